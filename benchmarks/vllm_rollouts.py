"""The side of vLLM in benchmarks/generate.py: run by a Python that has vLLM, and nothing of this repository.

    PYTHON benchmarks/vllm_rollouts.py FOLDER TOKENS

Reads a line of JSON for every rollout, and writes one with its seconds of processor time.
"""

import json
import os
import sys
import time

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}


def main() -> None:
    import torch
    import vllm  # pyright: ignore[reportMissingImports]
    from PIL import Image

    torch.set_num_threads(1)
    folder, ids = sys.argv[1], json.loads(sys.argv[2])
    model = vllm.LLM(
        model=folder, dtype="float32", block_size=32, max_model_len=2048, max_num_batched_tokens=16384,
        enforce_eager=True, logprobs_mode="processed_logprobs", generation_config="vllm", seed=0,
    )  # fmt: skip
    torch.set_num_threads(1)
    print(json.dumps({"version": vllm.__version__}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        draw, side = torch.Generator().manual_seed(asked["seed"]), 28 * round(asked["visual"] ** 0.5)
        noise = [
            torch.randint(0, 255, (side, side, 3), generator=draw, dtype=torch.uint8)
            for _ in range(asked["prompts"])
        ]
        prompts = [
            {"prompt_token_ids": ids, "multi_modal_data": {"image": Image.fromarray(pixels.numpy())}}
            for pixels in noise
        ]
        sampling = vllm.SamplingParams(
            n=asked["answers"], temperature=1.0, max_tokens=asked["new"], ignore_eos=True, logprobs=0,
            detokenize=False,
        )  # fmt: skip
        start = time.process_time()
        results = model.generate(prompts, sampling, use_tqdm=False)
        seconds = time.process_time() - start
        lengths = {len(answer.token_ids) for result in results for answer in result.outputs}
        assert lengths == {asked["new"]}, lengths
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
