"""The side of vLLM in benchmarks/generate.py: run by a Python that has vLLM, and nothing of this repository.

    PYTHON benchmarks/vllm_rollouts.py FOLDER TOKENS THREADS          # vLLM in this process
    PYTHON benchmarks/vllm_rollouts.py FOLDER TOKENS THREADS ADDRESS  # TRL's client of a server

Reads a line of JSON for every rollout, and writes one with its seconds, and its seconds of processor time.
"""

import json
import os
import sys
import time

FOLDER, IDS, THREADS = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
os.environ["OMP_NUM_THREADS"] = str(THREADS)


def in_process():
    """Start vLLM here; returns a rollout of images, and its version."""
    import torch
    import vllm  # pyright: ignore[reportMissingImports]

    model = vllm.LLM(
        model=FOLDER, dtype="float32", block_size=32, max_model_len=2048, max_num_batched_tokens=16384,
        enforce_eager=True, logprobs_mode="processed_logprobs", generation_config="vllm", seed=0,
    )  # fmt: skip
    torch.set_num_threads(THREADS)

    def rollout(shown: list, new: int, answers: int) -> list:
        prompts = [{"prompt_token_ids": IDS, "multi_modal_data": {"image": image}} for image in shown]
        sampling = vllm.SamplingParams(
            n=answers, temperature=1.0, max_tokens=new, ignore_eos=True, logprobs=0, detokenize=False
        )
        results = model.generate(prompts, sampling, use_tqdm=False)
        return [answer.token_ids for result in results for answer in result.outputs]

    return rollout, vllm.__version__


def by_trl(address: str):
    """Ask a server as TRL's GRPOTrainer does with `vllm_mode="server"`, without its tokens for learning."""
    from types import SimpleNamespace

    import trl  # pyright: ignore[reportMissingImports]
    from transformers import AutoProcessor
    from trl.generation import vllm_client  # pyright: ignore[reportMissingImports]
    from trl.generation.vllm_generation import VLLMGeneration  # pyright: ignore[reportMissingImports]

    parse = vllm_client.parse_logprobs

    def parse_logprobs(choices: list):
        """Name tokens as vLLM 0.31 did: TRL 1.16 ends with `KeyError: 'token'` at answers of 0.32."""
        for choice in choices:
            for entry in choice["content"]:
                for one in (entry, *entry["top_logprobs"]):
                    one["token"] = f"token_id:{one['token_id']}"
        return parse(choices)

    vllm_client.parse_logprobs = parse_logprobs
    client, processor = vllm_client.VLLMClient(base_url=address), AutoProcessor.from_pretrained(FOLDER)
    # The trainer's own object, without what it needs for learning.
    trainer = VLLMGeneration.__new__(VLLMGeneration)
    trainer.accelerator = SimpleNamespace(is_main_process=True, process_index=0, num_processes=1)
    trainer.mode, trainer.vllm_client, trainer.processing_class = "server", client, processor
    trainer.temperature, trainer.top_p, trainer.top_k, trainer.min_p = 1.0, 1.0, 0, None
    trainer.repetition_penalty, trainer.logprobs, trainer.structured_outputs_regex = 1.0, 0, None
    trainer.generation_kwargs = {"ignore_eos": True}

    def rollout(shown: list, new: int, answers: int) -> list:
        text = processor.tokenizer.decode(IDS)
        ids = [processor(images=[image], text=[text])["input_ids"][0] for image in shown]
        trainer.max_completion_length = new
        _, found, logp, _ = trainer.generate(
            [row for row in ids for _ in range(answers)],
            [[i] for i in shown for _ in range(answers)],
            answers,
        )
        assert logp
        return found

    return rollout, trl.__version__


def main() -> None:
    import torch
    from PIL import Image

    torch.set_num_threads(THREADS)
    rollout, version = by_trl(sys.argv[4]) if len(sys.argv) > 4 else in_process()
    print(json.dumps({"version": version}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        draw, side = torch.Generator().manual_seed(asked["seed"]), 28 * round(asked["visual"] ** 0.5)
        shown = [
            Image.fromarray(torch.randint(0, 255, (side, side, 3), generator=draw, dtype=torch.uint8).numpy())
            for _ in range(asked["prompts"])
        ]
        start, used = time.perf_counter(), time.process_time()
        found = rollout(shown, asked["new"], asked["answers"])
        seconds = {"seconds": time.perf_counter() - start, "processor": time.process_time() - used}
        assert len(found) == asked["prompts"] * asked["answers"], len(found)
        assert {len(answer) for answer in found} == {asked["new"]}, {len(answer) for answer in found}
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
