"""Serve a tiny Qwen2 checkpoint with llama.cpp: PYTHON llama_cpp_server.py CHECKPOINT PORT [F16].

Runs in an environment with `xllamacpp` (llama.cpp's own server as a library), `gguf` and `safetensors`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import gguf  # pyright: ignore[reportMissingImports]
import numpy as np
import xllamacpp  # pyright: ignore[reportMissingImports]
from safetensors.numpy import load_file

PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def converted(checkpoint: Path, output: Path) -> None:
    """Write a checkpoint in float32 as a GGUF file."""
    config = json.loads((checkpoint / "config.json").read_text())
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(output, "qwen2")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    words = {number: word for word, number in tokenizer["model"]["vocab"].items()}
    added = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([(words | added)[number] for number in range(config["vocab_size"])])
    writer.add_token_types(
        [kinds.CONTROL if number in added else kinds.NORMAL for number in range(config["vocab_size"])]
    )
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        base, _, end = name.rpartition(".")
        if base not in WHOLE:
            _, _, layer, part = base.split(".", 3)
            WHOLE[base] = f"blk.{layer}.{PARTS[part]}"
        writer.add_tensor(f"{WHOLE[base]}.{end}", weight.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(checkpoint: Path, port: int, cache: str = "F32") -> None:
    """Convert a checkpoint and serve it until the process ends; `cache` is the type of keys and values."""
    output = checkpoint / "model.gguf"
    converted(checkpoint, output)
    params = xllamacpp.CommonParams()
    params.model.path, params.port = str(output), port
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 2048, 4, 1
    params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type[f"GGML_TYPE_{cache}"].value
    params.flash_attn_type = 0 if cache == "F32" else params.flash_attn_type  # which computes in 16 bits
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
