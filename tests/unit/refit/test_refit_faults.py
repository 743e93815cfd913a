"""The campaign of refit faults: its short form finds nothing, and it finds an engine that does not keep the rules."""

import logging

import pytest
import refit_faults
from receiving_rank import PlainSession, ReceivingRank
from refit_campaign import Campaign
from refit_targets import Meddled, RanksTarget

from qarl_nemo.refit.send import DirectSender


@pytest.mark.slow
def test_a_part_of_the_faults_is_survived():
    counts = refit_faults.run(seed=1, short=True)
    assert counts["failures"] == []
    assert counts["survived"] == counts["faults"] > 50
    assert counts["aba_identical"] == counts["aba_rounds"] == 10


class Trusting(PlainSession):
    """A rank that replaces what it has, as it is told to."""

    def replace(self, version):
        self.version = version
        self.install(self._update.layers)


class OneRank:
    """An engine of one rank in this process."""

    def __init__(self, session):
        self.rank = ReceivingRank()
        self.rank.session = session

    def collective_rpc(self, method, *, args=()):
        return [getattr(self.rank, method)(*args)]

    def reset_prefix_cache(self):
        return True

    def is_busy(self):
        return False


class Here(RanksTarget):
    """The same updates for it."""

    def __init__(self, session):
        super().__init__()
        self.processes.close()
        self.engine = Meddled(OneRank(session))

    def sender(self, timeout_s):
        return DirectSender()


@pytest.mark.parametrize("rank", [PlainSession, Trusting])
def test_a_rank_that_trusts_its_driver_is_found_out(rank, tmp_path):
    campaign = Campaign(Here(rank()), 0, tmp_path)
    logging.disable(logging.ERROR)
    campaign.scripts()
    logging.disable(logging.NOTSET)
    found = [failure for failure in campaign.counts.failures if "what serves is not" in failure]
    assert campaign.counts.tried > 90
    assert (len(found) > 10) == (rank is Trusting)
    assert (len(campaign.counts.failures) == 0) == (rank is PlainSession)
