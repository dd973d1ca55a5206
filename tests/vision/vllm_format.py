"""Write which fields the requests and answers of a version of vLLM have, as its source declares them.

`python -m tests.vision.vllm_format SITE_PACKAGES/vllm vllm_0_33.json` reads without importing, so the
build for GPUs will do on any machine.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

CLASSES = {
    "entrypoints/scale_out/token_in_token_out/protocol.py": (
        *("GenerateRequest", "MultiModalFeatures", "PlaceholderRangeInfo", "GenerateResponseBase"),
        *("GenerateChoiceBase", "GenerateTokensChoice", "GenerateLogProbs", "GenerateLogProb"),
    ),
    "multimodal/inputs.py": (
        *("MultiModalFieldElem", "BaseMultiModalField", "MultiModalFlatField"),
        *("MultiModalBatchedField", "MultiModalSharedField"),
    ),
    "sampling_params.py": ("SamplingParams",),
    "outputs.py": ("WeightVersionSpan",),
}


def fields(folder: Path) -> dict[str, list[str]]:
    """Map classes of the format to the names of their fields."""
    return {
        node.name: [part.target.id for part in node.body if isinstance(part, ast.AnnAssign)]
        for file, names in CLASSES.items()
        for node in ast.parse((folder / file).read_text()).body
        if isinstance(node, ast.ClassDef) and node.name in names
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(fields(Path(sys.argv[1])), indent=1) + "\n")
