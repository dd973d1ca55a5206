"""R1-Router (arXiv 2505.22095): rewards for the next sub-question, its source, and the final answer.

Title: Learning to Route Queries Across Knowledge Bases for Step-wise Retrieval-Augmented Reasoning
Formula: step: cos(sub-questions) / 2 + [the retriever is right] / 2; end: recall of the words of the
answer.
Our reading: the released code trains on one step of a recorded solution at a time (`vision.stepwise`). In the
loop (`vision.with_retrievers`) turn t is compared with recorded step t; a turn after the last one earns 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from mmrl.config.ranges import NonNegativeInt, PositiveInt
from mmrl.config.registry import data, engine, reward
from mmrl.core.answer_text import tagged
from mmrl.core.answers import words_of
from mmrl.core.episodes import TURN, turn_number
from mmrl.core.plain_text import PlainText
from mmrl.core.tool_calls import Call, CallError, parse_calls
from mmrl.core.types import Message, Outcome, Part, Prompt
from mmrl.data.dataset_io import DataRow, Rows, read_prompts
from mmrl.data.fields import RowError, listed, mapping, short, text, uid_of
from mmrl.data.media_root import MediaRef, MediaRoot, media_refs
from mmrl.data.messages import interleaved
from mmrl.data.row_fields import has_content
from mmrl.data.video import FrameSampling
from mmrl.rewards.adapters import per_outcome
from mmrl.rewards.answers import own_block
from mmrl.rewards.text_models import load_text_model
from mmrl.vision.engines.with_tools import WithTools
from mmrl.vision.media.prompts import answers_of

NO_RETRIEVER = "none"
SHORT = 5  # words of an answer of which every one is wanted


@reward
class RouteReward:
    """Reward the next retrieval step: half for the sub-question, half for the retriever (R1-Router).

    arXiv 2505.22095. The answer has the blocks `think`, `sub-question` and `ret`, and the target is
    `{"query": ..., "retriever": [...]}`, as `vision.stepwise` reads it. The reward is 0.5 times the cosine of
    the embeddings of both sub-questions, plus 0.5 if exactly one retriever is named and it is the target's
    first. A missing block, an unknown retriever or `none` beside another gives 0; a prompt with another
    target None. Case does not matter.

    In conversations of `vision.with_retrievers`, with `at: every`, the target of turn t is element t of the
    column `steps`, a list of such targets. A turn after the last step earns 0, and a turn with an `answer`
    block None.

    Args:
        model: Model of transformers that embeds sub-questions, in safetensors.
        retrievers: The retrievers that may be named, besides `none`.
        pooling: How a text becomes one vector: `cls` takes the first token's, as BGE-M3's dense vectors do,
            `mean` the mean over tokens.
        max_length: Most tokens of a sub-question; longer ones are cut.
        batch_size: Sub-questions that are embedded at once.
        device: Torch device; `auto` is the current GPU, or the CPU.
    """

    def __init__(
        self,
        *,
        model: str = "BAAI/bge-m3",
        retrievers: tuple[str, ...] = ("text retriever", "text image retriever", "table retriever"),
        pooling: Literal["cls", "mean"] = "cls",
        max_length: PositiveInt = 1024,
        batch_size: PositiveInt = 12,
        device: str = "auto",
    ) -> None:
        self.tokenizer, self.model = load_text_model("AutoModel", model, device)
        self.allowed = {NO_RETRIEVER, *(name.lower() for name in retrievers)}
        self.plain = PlainText(self.tokenizer)
        self.pooling, self.max_length, self.batch_size = pooling, max_length, batch_size

    def __call__(self, prompts: Sequence[Prompt], outcomes: Sequence[Outcome]) -> list[float | None]:
        """Compute the reward of every outcome; None where the target is no retrieval step."""
        targets = [_target(prompt, outcome) for prompt, outcome in zip(prompts, outcomes, strict=True)]
        steps = [self._step(outcome.text or "") for outcome in outcomes]
        pairs = zip(steps, targets, strict=True)
        read = [(step[0], target[0]) for step, target in pairs if step and target and target[1]]
        texts = list(dict.fromkeys(text for both in read for text in both))
        vectors = dict(zip(texts, self.embed(texts), strict=True)) if texts else {}
        rewards: list[float | None] = []
        for step, target in zip(steps, targets, strict=True):
            if target is None or step is None or not target[1]:
                rewards.append(None if target is None else 0.0)
                continue
            cosine = float(vectors[step[0]] @ vectors[target[0]])
            rewards.append(0.5 * cosine + 0.5 * (step[1] == target[1][:1]))
        return rewards

    def _step(self, text: str) -> tuple[str, list[str]] | None:
        """Parse a step into its sub-question and its retrievers; None where it is not well formed."""
        text = text.lower()
        blocks = [tagged(text, tag) for tag in ("think", "sub-question", "ret")]
        if not all(blocks):
            return None
        _, query, named = (found[0].strip() for found in blocks)
        retrievers = [name.strip() for name in named.split(",")]
        alone = len(retrievers) == 1 or NO_RETRIEVER not in retrievers
        return (query, retrievers) if alone and self.allowed.issuperset(retrievers) else None

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> Tensor:
        """Embed texts as unit vectors: (number of texts, width)."""
        vectors = []
        for at in range(0, len(texts), self.batch_size):
            batch = self.plain.batch(
                texts[at : at + self.batch_size],
                padding=True,
                truncation=True,
                max_length=self.max_length,
                return_tensors="pt",
            ).to(self.model.device)
            states = self.model(**batch).last_hidden_state.float()  # (n, T, width)
            mask = batch["attention_mask"][..., None].to(states)
            mean = (states * mask).sum(1) / mask.sum(1).clamp(min=1)
            vectors.append(torch.nn.functional.normalize(states[:, 0] if self.pooling == "cls" else mean))
        return torch.cat(vectors).cpu()


def _target(prompt: Prompt, outcome: Outcome) -> tuple[str, list[str]] | None:
    """Return the sub-question and the retrievers of a step; no retriever after the last step."""
    wanted: Any = prompt.target
    if TURN in outcome.tags and not tagged(outcome.text or "", "answer"):
        steps = listed(prompt.columns.get("steps"), "steps")
        turn = turn_number(outcome.tags)
        wanted = _route(steps[turn]) if turn < len(steps) else {"query": "", "retriever": []}
    match wanted:
        case {"query": str(query), "retriever": [*retrievers]}:
            return query.lower().strip(), [str(name).lower().strip() for name in retrievers]
    return None


@reward(own_answer=own_block)
@per_outcome
def answer_recall(prompt: Prompt, outcome: Outcome) -> float | None:
    """Measure the recall of an answer's words, as R1-Router scores final steps (arXiv 2505.22095).

    The answer has the blocks `think` and `answer`; without one it earns 0. Of several targets that of the
    best F1 counts. A single target of more than 5 words earns its recall; a shorter one, and several, earn 1
    for full recall and else 0. Words are compared without case, articles and punctuation, with numbers up to
    ten in digits: our reading of a longer normalisation. None where the target is no text.
    """
    match prompt.target:
        case str() as target:
            targets = [target]
        case [str(), *_] as several:
            targets = list(several)
        case _:
            return None
    thoughts, answers = (tagged(outcome.text or "", tag) for tag in ("think", "answer"))
    if not thoughts or not answers:
        return 0.0
    _, recall = max((_f1_and_recall(answers[0], target) for target in targets), key=lambda both: both[0])
    if len(targets) == 1 and len(targets[0].split()) > SHORT:
        return recall
    return float(recall == 1)


def _f1_and_recall(answer: str, target: str) -> tuple[float, float]:
    words, wanted = words_of(answer), words_of(target)
    shared = (Counter(words) & Counter(wanted)).total()
    return (2 * shared / (len(words) + len(wanted)), shared / len(wanted)) if shared else (0.0, 0.0)


def routes(text: str) -> list[Call | CallError]:
    """Parse the retrievers that a turn names, as calls with its sub-question; or its tool calls."""
    query, named = (tagged(text, tag)[:1] for tag in ("sub-question", "ret"))
    if not query or not named:
        return parse_calls(text)
    names = ("_".join(name.lower().split()) for name in named[0].split(","))
    return [Call(name, {"query": query[0].strip()}) for name in names]


def none(query: str) -> str:
    """Retrieve nothing, because everything that the answer needs is known.

    Args:
        query: None.
    """
    return "Nothing is left to retrieve. Answer the question."


@engine(scope="vision")
@dataclass(eq=False)
class WithRetrievers(WithTools):
    """Let the policy ask sub-questions, choose a retriever for each, and answer (R1-Router).

    arXiv 2505.22095. A turn names a retriever in the blocks `sub-question` and `ret`, or by a tool call; the
    next turn reads what it found. `Text Image Retriever` calls the tool `text_image_retriever`; `none` tells
    the policy to answer. A turn without a retriever is the answer. Otherwise as `vision.with_tools`.

    Args:
        tool: The retrievers, such as `vision.search` and `vision.search_images`, with the retrievers' names
            as `label`.
        max_turns: Maximal number of policy turns; the paper has three retrievals before the answer.
        max_completion_length: Maximal number of tokens that the policy samples in a conversation.
        max_images: Maximal number of images and videos from tools in a conversation.
        only_n_most_recent_images: How many of the latest images from tools stay in the prompt; 0: all.
        max_context: Maximal tokens of a conversation, read and sampled; 0: the model's number of positions.
        max_reply_chars: Maximal characters of the texts that a tool returns at once; the rest is cut off.
        max_image_pixels: Maximal pixels of an image that a tool returns.
        turn_outcomes: Make an outcome of every turn, which `route_reward` with `at: every` scores.
        score_target: Record the probability of the right answer before every turn.
        opener: Text before the right answer.
    """

    _: KW_ONLY
    turn_outcomes: bool = True
    parse: ClassVar = staticmethod(routes)

    def __post_init__(self) -> None:
        self.tool = (*self.tool, none)
        super().__post_init__()


QUESTIONS = ("problem", "prompt", "question")
READS = (QUESTIONS, "step_type", "system", "answer", "images", "uid", "row")
FORMATS = {"ret": "think,sub-question,ret", "ans": "think,answer"}


@data(scope="vision")
def stepwise(
    *,
    path: str,
    root: str = "",
    steps: Literal["all", "ret", "ans"] = "all",
    bad_rows: Literal["error", "drop"] = "error",
    limit: NonNegativeInt = 0,
) -> Sequence[Prompt]:
    """Read rows of several steps, each of which becomes a prompt with a group of its own (Step-GRPO).

    R1-Router, arXiv 2505.22095. A row has `steps` and perhaps `images`, which every step that marks <image>
    shows. A step has `step_type`, `problem` (or `prompt`, `question`), perhaps `system`, and `answer`: for
    `ret` `{"query": ..., "retriever": [...]}`, for `ans` a text or a list of texts. So what a step knows of
    earlier ones is what its `problem` says: training is teacher-forced. Read them with `route_reward` and
    `answer_recall`; the column `format` has the blocks that `tag_format` wants.

    Args:
        path: jsonl, JSON, parquet or a folder of `datasets`.
        root: Folder of the images; by default that of the rows.
        steps: Which steps are prompts: `all`, only retrieval (`ret`) or only answers (`ans`).
        bad_rows: Rows that cannot be used raise (`error`) or are skipped and logged (`drop`).
        limit: Most prompts to read; 0 for all.
    """
    source = Path(path)
    media = MediaRoot.of_rows(source, root)
    step_rows = _StepRows(Rows(source, media.root))

    def make(row: DataRow, position: int) -> Prompt | None:
        step = row.columns
        kind = step.get("step_type")
        if kind not in FORMATS:
            raise RowError(f"wanted ret or ans as `step_type`, got {short(kind)}")
        if steps not in ("all", kind):
            return None
        question = text(next((step[name] for name in QUESTIONS if name in step), None), QUESTIONS[0])
        # Every step of the row marks those of the row's images that it shows; one without marks shows none.
        refs: list[MediaRef] = list(media_refs(step.get("images"), "image", "images"))
        refs = refs[: question.count("<image>")]
        shown = [media.medium(ref, row.place, FrameSampling()) for ref in refs]
        parts = interleaved(question, shown) if shown or "<image>" in question else (Part(question),)
        system = step.get("system")
        head = (Message("system", (Part(text(system, "system")),)),) if system else ()
        columns = {key: value for key, value in row.all.items() if key not in ("images", "answer")}
        columns |= {"step_type": kind, "format": FORMATS[kind]}
        target = _route(step.get("answer")) if kind == "ret" else answers_of(_as_answers(step.get("answer")))
        return Prompt(step["uid"], (*head, Message("user", parts)), target, columns=columns)

    return read_prompts(source, step_rows, make, reads=READS, bad_rows=bad_rows, limit=limit)


@dataclass(frozen=True)
class _StepRows:
    """The steps of rows, as rows: with the row's id and number as `uid`, its images, and its place."""

    rows: Rows

    def __iter__(self) -> Iterator[DataRow]:
        for number, row in enumerate(self.rows):
            try:
                if row.fault:
                    raise RowError(row.fault)
                base = uid_of(row.columns, f"{row.split}#{number}")
                found = listed(row.columns.get("steps"), "steps")
                if not found:
                    raise RowError("wanted at least one of `steps`, got none")
                fields = [mapping(step, f"steps[{i}]") for i, step in enumerate(found)]
            except RowError as error:
                yield DataRow(row.place, row.split, fault=str(error))
                continue
            shared = {key: value for key, value in row.columns.items() if key not in ("steps", "id", "split")}
            for i, step in enumerate(fields):
                own = {key: value for key, value in step.items() if has_content(value) or key not in shared}
                twice = [key for key in own if key != "images" and own[key] != shared.get(key, own[key])]
                fault = f"`{twice[0]}` of the step is not that of its row; keep one" if twice else ""
                whole = {**shared, **own, "uid": f"{base}/{i}", "row": base}
                yield DataRow(f"{row.place} steps[{i}]", row.split, whole, fault)


def _as_answers(value: Any) -> Mapping[str, Any]:
    match value:
        case [*_]:
            return {"answers": value}
    return {"answer": value}


def _route(value: Any) -> Mapping[str, Any]:
    """Read the target of a retrieval step: a sub-question, and one retriever or a list of them."""
    route = mapping(value, "answer")
    match route.get("retriever"):
        case str(name):
            several = [name]
        case named:
            several = listed(named, "answer.retriever")
    if not several:
        raise RowError("wanted at least one name as `answer.retriever`, got none")
    retrievers = [text(name, f"answer.retriever[{i}]") for i, name in enumerate(several)]
    return {"query": text(route.get("query"), "answer.query"), "retriever": retrievers}
