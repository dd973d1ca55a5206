"""Model families on vLLM servers: each file has a table `FAMILIES` from `model_type` to `ServedFamily`."""
