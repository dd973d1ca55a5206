"""GLM-4.1V, 4.5V and 4.6V on vLLM servers: patches as for Qwen; video frames are sent as images."""

from __future__ import annotations

from mmrl.vision.serving.served_family import AS_IMAGES, ServedFamily, patches, split_items

FAMILIES = dict.fromkeys(("glm4v", "glm4v_moe", "glm46v"), ServedFamily(AS_IMAGES, split_items(patches)))
