"""Has vLLM load the experts of gpt-oss that it quantises while it loads them.

vLLM makes such parameters on `meta`, and puts a loader around each that quantises a layer when the last has
come. Its loader of gpt-oss copies into the experts' parameters past that: copies to `meta` are nothing, and
experts of memory that was never written were quantised (0.26 and 0.32, `_load_weights_other`).
"""

from typing import Any


def load_biased_experts() -> None:
    """Give experts with biases, as gpt-oss alone has them, memory before they are loaded."""
    try:
        from vllm.model_executor.layers.quantization.online import moe_base
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.model_executor.model_loader.reload.meta import materialize_layer
    except ImportError:  # an older release
        return
    begin = moe_base.initialize_online_processing

    def initialize_online_processing(layer: Any) -> None:
        begin(layer)
        if "w13_bias" in layer._parameters:
            materialize_layer(layer, get_layerwise_info(layer))

    moe_base.initialize_online_processing = initialize_online_processing
