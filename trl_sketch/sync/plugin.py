"""Entry point of the group `vllm.general_plugins`: makes the backend `sketch` known. vLLM calls it in every process."""


def register() -> None:
    """Register the engine by name; its module is imported when a server uses it. May be called more than once."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if "sketch" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            "sketch", "trl_sketch.sync.vllm_engine", "SketchWeightTransferEngine"
        )
