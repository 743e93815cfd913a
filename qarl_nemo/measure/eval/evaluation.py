"""One model and what it is asked: prompts as it sees them, and an answer to each, new or from the file."""

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from qarl_nemo.data.benchmark_problems import are_right, checker
from qarl_nemo.data.benchmarks import Benchmark
from qarl_nemo.files import FileError
from qarl_nemo.measure.eval.engine import Answer
from qarl_nemo.measure.eval.models import EvalModel
from qarl_nemo.measure.eval.packed import PackedEngine
from qarl_nemo.measure.eval.settings import EvalJob, Questions
from qarl_nemo.measure.eval.store import AnswerStore, Row
from qarl_nemo.measure.eval.vllm import VllmEngine
from qarl_nemo.train.model import load_tokenizer, stored_stop_ids
from qarl_nemo.train.prompts import PromptEncoder
from qarl_nemo.train.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Asked:
    """One benchmark as one model is asked it.

    Attributes:
        questions: the problems.
        prompts: index of a problem -> its token ids; those that are too long are left out.
        texts: index of a problem -> the prompt as the model sees it.
        sources: index of a problem -> a digest of what that is written from: question, system prompt and template.
        params: how answers are drawn; shorter than the record's where the model's context is.
    """

    questions: Questions
    prompts: dict[int, list[int]]
    texts: dict[int, str]
    sources: dict[int, str]
    params: SamplingParams

    @property
    def benchmark(self) -> Benchmark:
        """Its record."""
        return self.questions.benchmark

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Index of the problem and number of the answer, in the order in which they are asked."""
        return [(index, sample) for index in self.prompts for sample in range(self.benchmark.num_samples)]


class ModelEvaluation:
    """One model and everything it is asked; its engine starts when the first answer is missing.

    Attributes:
        num_differently: how many kept answers today's checker judges differently than the one that judged them.

    Raises:
        ValueError: its tokenizer cannot be used, or its context leaves no room for an answer.
    """

    def __init__(self, job: EvalJob, model: EvalModel, store: AnswerStore) -> None:
        self.job, self.model, self.store = job, model, store
        self._identity = {"model": model.label, "checkpoint": str(model.folder), "weights": model.fingerprint()}
        self.tokenizer = load_tokenizer(model.folder, model.checkpoint.folder)
        prompts = job.settings.prompts or model.prompts
        self.encoder = PromptEncoder(self.tokenizer, prompts, key="--chat-template", none="none")
        self.asked = [self._ask(questions) for questions in job.questions]
        self.engine: PackedEngine | VllmEngine | None = None
        self.num_differently = 0

    @property
    def num_answers(self) -> int:
        """How many answers there will be."""
        return sum(len(asked.pairs) for asked in self.asked)

    @property
    def num_kept(self) -> int:
        """How many of them the file has."""
        return sum(
            len(pairs)
            for asked in self.asked
            for number, pairs in enumerate(self._chunks(asked))
            if self._kept(asked, number, pairs) is not None
        )

    def answers(self, asked: Asked, show: Callable[[int], None]) -> list[Row]:
        """Return all answers to one benchmark, from the file where it has them, all judged by the same checker.

        Args:
            asked: the benchmark.
            show: called with the number of new answers, as they come.

        Raises:
            FileError: the file has answers of other weights, or to other prompts.
        """
        rows: list[Row] = []
        for number, pairs in enumerate(self._chunks(asked)):
            chunk = self._kept(asked, number, pairs)
            if chunk is None:
                chunk = self._new_chunk(asked, number, pairs)
                show(len(chunk))
            rows += chunk
        self._judge_anew(asked, [row for row in rows if row.get("checker") != checker()])
        return rows

    def close(self) -> None:
        """End the engine."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def _kept(self, asked: Asked, number: int, pairs: list[tuple[int, int]]) -> list[Row] | None:
        chunk = self.store.chunk(self.model.label, asked.benchmark.name, number)
        if chunk is not None:
            self._require_same(asked, chunk, pairs)
        return chunk

    def _chunks(self, asked: Asked) -> Iterator[list[tuple[int, int]]]:
        pairs, size = asked.pairs, self.job.chunk_size
        for start in range(0, len(pairs), size):
            yield pairs[start : start + size]

    def _new_chunk(self, asked: Asked, number: int, pairs: list[tuple[int, int]]) -> list[Row]:
        benchmark = asked.benchmark
        seeds = [_seed(self.job.settings.seed, benchmark.name, *pair) for pair in pairs]
        self.engine = self.engine or self._start()
        answers = self.engine.answer([asked.prompts[index] for index, _ in pairs], asked.params, seeds)
        # Together, because math-verify takes up to five seconds for a response that loops.
        expected = [asked.questions.problems[index].answer for index, _ in pairs]
        right = are_right(benchmark, [answer.text for answer in answers], expected)
        place = self._identity | {"benchmark": benchmark.name, "chunk": number, "chunk_size": len(pairs)}
        chunk = [
            place
            | {"problem": index, "sample": sample}
            | _row(asked, index, answer)
            | {"right": one, "checker": checker()}
            for (index, sample), answer, one in zip(pairs, answers, right, strict=True)
        ]
        self.store.add(chunk)
        return chunk

    def _judge_anew(self, asked: Asked, rows: list[Row]) -> None:
        if not rows:
            return
        right = are_right(asked.benchmark, [row["response"] for row in rows], [row["answer"] for row in rows])
        self.num_differently += sum(row["right"] != one for row, one in zip(rows, right, strict=True))
        for row, one in zip(rows, right, strict=True):
            row |= {"right": one, "checker": checker()}
        self.store.rewrite()

    def _require_same(self, asked: Asked, chunk: list[Row], pairs: list[tuple[int, int]]) -> None:
        place = f"{self.store.path}: {self.model.label}, {asked.benchmark.name}"
        if [(row["problem"], row["sample"]) for row in chunk] != pairs:
            raise FileError(f"{place}: other problems are asked now; choose another --output, or delete that file")
        for row in chunk:
            index = row["problem"]
            problem = asked.questions.problems.get(index)
            expected = self._identity | {"prompt": asked.texts.get(index), "answer": problem and problem.answer}
            differing = [key for key, value in expected.items() if row.get(key) != value]
            # Some templates write the day, which is another one when an evaluation goes on.
            if "prompt" in differing and row.get("source") == asked.sources.get(index, ""):
                differing.remove("prompt")
            if differing:
                raise FileError(
                    f"{place}, problem {index} differs from now in {', '.join(differing)}; choose another --output, or "
                    "delete that file"
                )

    def _ask(self, questions: Questions) -> Asked:
        benchmark = questions.benchmark
        asked = {index: benchmark.ask(problem.question) for index, problem in questions.problems.items()}
        try:
            texts = {index: self._as_seen(text) for index, text in asked.items()}
        except ValueError as error:
            raise ValueError(f"{self.model.label}: {error}") from error
        # The template writes all special tokens that the model expects.
        encoded = {index: self.tokenizer(text, add_special_tokens=False)["input_ids"] for index, text in texts.items()}
        context = self.model.checkpoint.config.get("max_position_embeddings", math.inf)
        longest = min(benchmark.max_prompt_tokens, context - 1)
        prompts = {index: ids for index, ids in encoded.items() if len(ids) <= longest}
        if not prompts:
            shortest = min(map(len, encoded.values()))
            why = (
                "leave room for an answer in this model's positions"
                if longest < benchmark.max_prompt_tokens
                else "are asked"
            )
            raise ValueError(
                f"{self.model.label}: all prompts of {benchmark.name} are too long: the shortest has {shortest} "
                f"tokens, and at most {longest} {why}"
            )
        room = context - max(map(len, prompts.values()))
        params = SamplingParams(min(benchmark.max_new_tokens, room), benchmark.temperature, benchmark.top_p)
        return Asked(questions, prompts, texts, {index: self._source(text) for index, text in asked.items()}, params)

    def shown(self, asked: Asked, index: int) -> str:
        """Return a prompt for people, with the tokenizer's mark where it lacks what is written."""
        ids, unknown = asked.prompts[index], self.tokenizer.unk_token_id
        return asked.texts[index] if unknown is None or unknown not in ids else str(self.tokenizer.decode(ids))

    def _as_seen(self, text: str) -> str:
        system = self.job.settings.system_prompt
        if system is None:
            return self.encoder.text(text)
        # With `none` every model sees the joined texts, as in training, whatever template its tokenizer has.
        if self.encoder.settings.chat_template is not None and not self.encoder.template:
            return f"{system}\n\n{text}"
        return self.encoder.text(({"role": "system", "content": system}, {"role": "user", "content": text}))

    def _source(self, text: str) -> str:
        encoder = self.encoder
        written_from = [text, self.job.settings.system_prompt, encoder.template, encoder.settings.chat_template_kwargs]
        return hashlib.sha256(json.dumps(written_from, sort_keys=True, default=str).encode()).hexdigest()[:16]

    def _start(self) -> PackedEngine | VllmEngine:
        job, model = self.job, self.model
        stop_ids = stored_stop_ids(model.checkpoint.folder, self.tokenizer)
        if job.engine == "packed":
            return PackedEngine(model, self.tokenizer, stop_ids, device=job.device, dtype=job.dtype(model))
        return VllmEngine(
            model,
            self.tokenizer,
            stop_ids,
            device=job.device.type,
            batch_size=job.batch_size,
            max_model_len=max(
                len(prompt) + one.params.max_new_tokens for one in self.asked for prompt in one.prompts.values()
            ),
            gpu_memory_utilization=job.settings.gpu_memory_utilization,
            tensor_parallel_size=job.settings.tensor_parallel_size,
        )


def _row(asked: Asked, index: int, answer: Answer) -> Row:
    return {
        "prompt": asked.texts[index],
        "source": asked.sources[index],
        "response": answer.text,
        "num_tokens": answer.num_tokens,
        "truncated": answer.truncated,
        "answer": asked.questions.problems[index].answer,
    }


def _seed(seed: int, benchmark: str, index: int, sample: int) -> int:
    return random.Random(f"{seed}-{benchmark}-{index}-{sample}").getrandbits(31)
