"""A worker of vLLM on the CPU, without its engine: what its own strict loader of workers' files reads of a mount is what its usual
loader makes of the whole model.

    python vllm_ranks.py RANK TP PP PORT [NAME WHOLE SERVED]...

Prints `NAME equal N`, or what differs.
"""
import os
import sys

rank, tp, pp, port = (int(text) for text in sys.argv[1:5])
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(tp * pp), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                  VLLM_DIST_IDENT=f"ptc{port}", VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1")

import torch  # noqa: E402  pylint: disable=wrong-import-position
from vllm.config import set_current_vllm_config  # noqa: E402  pylint: disable=wrong-import-position
from vllm.distributed import init_distributed_environment, initialize_model_parallel  # noqa: E402  pylint: disable=wrong-import-position
from vllm.engine.arg_utils import EngineArgs  # noqa: E402  pylint: disable=wrong-import-position
from vllm.model_executor.model_loader import get_model_loader  # noqa: E402  pylint: disable=wrong-import-position
from vllm.model_executor.model_loader.utils import initialize_model  # noqa: E402  pylint: disable=wrong-import-position
from vllm.utils.torch_utils import set_default_torch_dtype  # noqa: E402  pylint: disable=wrong-import-position

torch.set_num_threads(1)
begun = []


def load(directory, load_format):
    config = EngineArgs(model=directory, skip_tokenizer_init=True, tensor_parallel_size=tp, pipeline_parallel_size=pp,
                        load_format=load_format, enforce_eager=True, max_model_len=64,
                        distributed_executor_backend="external_launcher" if tp * pp > 1 else None).create_engine_config()
    with set_current_vllm_config(config):
        if not begun:
            init_distributed_environment(world_size=tp * pp, rank=rank, local_rank=rank, backend="gloo",
                                         distributed_init_method=f"tcp://127.0.0.1:{port}")
            initialize_model_parallel(tp, pp)
            begun.append(True)
        with set_default_torch_dtype(config.model_config.dtype):
            model = initialize_model(vllm_config=config)
            for parameter in model.parameters():  # what is not loaded is seen
                parameter.data.fill_(7)
            get_model_loader(config.load_config).load_weights(model, config.model_config)
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def differing(whole, served):
    for name, value in whole.items():
        if name not in served or not torch.equal(value, served[name]):
            yield f"{name} {tuple(value.shape)}"


for name, whole_directory, served_directory in zip(sys.argv[5::3], sys.argv[6::3], sys.argv[7::3]):
    try:
        whole, served = load(whole_directory, "auto"), load(served_directory, "sharded_state")
        wrong = list(differing(whole, served))
        print(name, "differs: " + ", ".join(wrong) if wrong else f"equal {len(whole)}", flush=True)
    except Exception as error:  # pylint: disable=broad-exception-caught
        print(name, f"failed: {error!r}", flush=True)
os._exit(0)
