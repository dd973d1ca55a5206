"""Record of the media that a vLLM server caches; later turns of a conversation send only their hashes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mmrl.runtime.json_client import StatusError, as_json

MOST_HASHES = 4096  # maximal number of hashes remembered per server


class MediaSent:
    """Hashes of the media that a server got since its caches were cleared.

    vLLM 0.32 keeps tensors of media by hash. It answers status 500 to a request with the hash of a medium
    that it has dropped; such a request is sent again with all media. This holds for servers with one process
    for requests and `--mm-processor-cache-type lru`, the default. Elsewhere, a hash without its medium could
    crash the engine, so all media are sent.
    """

    def __init__(self) -> None:
        self.kept: bool | None = None  # whether the server keeps media; None: not known yet
        self.hashes: dict[str, None] = {}  # an ordered set, most recently used last
        self.lock = threading.Lock()

    def ask(
        self,
        request: Mapping[str, Any],
        generate: Callable[[bytes], bytes],
        info: Callable[[], bytes],
        sizes: list[int],
    ) -> bytes:
        """Send a request for answers and return the response; append the bytes of each try to `sizes`.

        `generate` sends a request as JSON, and `info` returns the configuration of the server as JSON.
        """
        named = request.get("features", {}).get("mm_hashes", {}).values()
        hashes = [digest for several in named for digest in several]
        if hashes and self.kept is None:
            self.kept = keeps_media(info)
        short = self.without_kept(request)
        sizes.append(len(written := as_json(short)))
        try:
            answer = generate(written)
        except StatusError:
            if short is request:
                raise
            self.forget()
            return self.ask(request, generate, info, sizes)
        self.add(hashes)
        return answer

    def add(self, hashes: Sequence[str]) -> None:
        """Record the hashes of media that the server has cached."""
        with self.lock:
            known = [digest for digest in self.hashes if digest not in hashes] + [*hashes]
            self.hashes = dict.fromkeys(known[-MOST_HASHES:]) if self.kept else {}

    def forget(self) -> None:
        """Forget all hashes, so that media are sent again."""
        with self.lock:
            self.hashes = {}

    def without_kept(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Replace media that the server has by their hashes; return the request itself if there are none."""
        hashes, features = self.hashes, request.get("features", {})
        named: Mapping[str, Sequence[str]] = features.get("mm_hashes", {})
        if not any(digest in hashes for several in named.values() for digest in several):
            return request
        data = {
            kind: [
                None if digest in hashes else item for digest, item in zip(named[kind], items, strict=True)
            ]
            for kind, items in features["kwargs_data"].items()
        }
        return {**request, "features": {**features, "kwargs_data": data}}


def keeps_media(info: Callable[[], bytes]) -> bool:
    """Whether a server caches media by hash and refuses unknown hashes with an error."""
    try:
        config = json.loads(info())["vllm_config"]
        media, parallel = config["model_config"]["multimodal_config"], config["parallel_config"]
        one = parallel["_api_process_count"] == 1 and parallel["data_parallel_size"] == 1
        return one and media["mm_processor_cache_type"] == "lru" and media["mm_processor_cache_gb"] > 0
    except (OSError, ValueError, KeyError, TypeError):
        return False
