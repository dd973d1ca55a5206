"""Weights sent from the learner's memory to vLLM servers, without a shared folder."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor

from mmrl.vision.serving.command import port_of
from mmrl.vision.serving.server import Server, Weights
from mmrl.vision.serving.weights import WeightsWriter, state_of
from mmrl.vision.serving.worker import mmrl_group

BACKEND = "mmrl"  # name under which vLLM knows our weight transfer


@dataclass(frozen=True)
class SentWeights(Weights):
    """Weights in memory: `tensors`, keyed by checkpoint name, and `config`, the settings of the adapter."""

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]

    @property
    def size(self) -> int:
        """Size of the weights in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def load_into(self, server: Server) -> None:
        """Send the weights to all workers of a paused server."""
        if self.adapter:
            receive = lambda meeting: server.call_workers(
                "receive_adapter", meeting=meeting, config=self.config
            )
            (folder, *_), *_ = self._meet(server, receive)
            server.load_adapter(folder)
            return
        server.post("start_weight_update", {})
        self._meet(server, lambda meeting: server.post("update_weights", {"update_info": meeting}))
        server.post("finish_weight_update", {})

    def _meet(self, server: Server, receive: Callable[[Mapping[str, Any]], Any]) -> Any:
        """Broadcast the tensors while `receive` asks the workers to join; return its reply."""
        place, timeout = urlsplit(server.url), server.request_timeout
        size = 1 + server.num_workers()
        address = mmrl_group.address_towards(place.hostname or "localhost", port_of(server.url))
        store = mmrl_group.listen(address, timeout)
        sent: Future[None] = Future()

        def send() -> None:
            try:
                group = mmrl_group.join(store, address, 0, size, timeout)
                mmrl_group.send(group, self.tensors.values())
                sent.set_result(None)
            except BaseException as error:
                sent.set_exception(error)

        # Broadcast in a daemon thread, which may hang if a server dies, while `receive` raises an error.
        threading.Thread(target=send, daemon=True).start()
        meeting = {"host": address, "port": store.port, "size": size, "timeout": timeout}
        reply = receive({**meeting, "tensors": mmrl_group.header(self.tensors)})
        sent.result(timeout)
        return reply


class WeightsCopier(WeightsWriter):
    """Copies the trained weights of a policy to memory after every change, instead of writing a folder."""

    def _written(self, version: str) -> Weights:
        adapter = self.policy.adapter
        if adapter is None:
            tensors, config = checkpoint_state(self.policy.model), {}
        else:
            from peft import get_peft_model_state_dict

            tensors = get_peft_model_state_dict(adapter, state_dict=state_of(adapter))
            config = plain(adapter.peft_config["default"].to_dict())
        copies = {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}
        return SentWeights(self.folder, version, adapter is not None, copies, config)


def checkpoint_state(model: Any) -> dict[str, Tensor]:
    """Return the weights of a model with the names and shapes that `save_pretrained` writes."""
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    ignored = model._keys_to_ignore_on_save or ()
    state = {name: value.detach() for name, value in state_of(model).items() if name not in ignored}
    return revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model))


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the settings of an adapter for JSON: sets become sorted lists."""
    return {
        name: sorted(value) if isinstance(value, set | frozenset) else value for name, value in config.items()
    }
