"""Rollout sync: vLLM's weights are kept equal to the trainer's, bit for bit, by sending updates and not weights.

`update` is what is sent, `plan` finds where a checkpoint tensor lies in vLLM's parameters, `checksum` compares weights,
`receiver` applies messages, `client` sends them over HTTP, `colocate` shares storage in one process. `vllm_engine` and
`plugin` alone import vLLM. The page on sync is `docs/sync.md`.
"""
