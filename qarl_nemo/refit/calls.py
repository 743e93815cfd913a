"""The calls by which a learner refits one rank of an engine; `push` and the senders make them."""

import os
from typing import Any

from qarl_nemo.refit.answers import answering
from qarl_nemo.refit.session import RankSession


@answering
class RankCalls:
    """RPC methods of a rank; a subclass says where its session is."""

    def _qarl_session(self) -> RankSession:
        raise NotImplementedError

    def qarl_process(self) -> int:
        """Return the process that this rank runs in."""
        return os.getpid()

    def qarl_version(self) -> dict[str, Any]:
        """Return the weight version served last (None before the first refit) and whether it is whole."""
        return self._qarl_session().state()

    def qarl_connect(self, message: dict[str, Any]) -> None:
        """Join a learner's process group."""
        self._qarl_session().arrivals.connect(message)

    def qarl_begin(self, manifest: dict[str, Any], rehearsed: bool) -> list[str]:
        """Expect an update; return the reasons against it."""
        return self._qarl_session().begin(manifest, rehearsed)

    def qarl_receive(self, version: int, kind: str, message: Any) -> None:
        """Take tensors of the expected update in."""
        self._qarl_session().receive(version, kind, message)

    def qarl_verify(self, version: int) -> list[str]:
        """Return what makes the update unfit to serve."""
        return self._qarl_session().verify(version)

    def qarl_replace(self, version: int) -> None:
        """Serve the update if it is whole; a rehearsed one is served while it is sent again."""
        self._qarl_session().replace(version)

    def qarl_replaced(self, version: int) -> None:
        """Serve the rehearsed update, all of which has been sent again."""
        self._qarl_session().finish(version)

    def qarl_abort(self, version: int) -> None:
        """Forget the update; the old version keeps serving."""
        self._qarl_session().abort(version)
