"""One rank of Megatron-Core on the CPU: a small GPT with the distributed optimizer, saved as Megatron-LM saves with
`--ckpt-format torch` or, where SHARDING is said, `torch_dist` with this sharding of the optimizer's state ("none": without it).
Its numbers depend on the names of the whole model's tensors alone, so that trees of all sizes hold the same model; `load` as what
to do compares what Megatron loads of such a tree. Run by test_megatron_core.py: megatron_ranks.py save|load TOP TP PP EP TYPE TIED
BUCKET SHARDING, with torchrun's variables."""
import argparse
import multiprocessing
import os
import re
import sys

import torch

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tools/examples"))
import megatron_cpu  # noqa: F401,E402  pylint: disable=unused-import,wrong-import-position
from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.dist_checkpointing import ShardedObject  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

LAYERS, HIDDEN, HEADS, GROUPS, FFN, VOCAB, EXPERTS, ITERATION = 4, 16, 4, 2, 24, 300, 4, 100


class Rank:
    """With EP > 1 a model of experts, else one of none."""

    def __init__(self, top, tp, pp, ep, dtype, tied, bucket):
        self.top, self.tp, self.pp, self.ep, self.dtype, self.tied, self.bucket = top, tp, pp, ep, dtype, tied, bucket
        experts = EXPERTS if ep > 1 else None
        torch.distributed.init_process_group("gloo")
        parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
        self.tp_rank, self.pp_rank = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
        self.ep_rank = parallel_state.get_expert_model_parallel_rank()
        self.rows = -(-VOCAB // (128 * tp)) * 128 * tp
        config = TransformerConfig(
            num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=GROUPS, ffn_hidden_size=FFN,
            num_moe_experts=experts, moe_ffn_hidden_size=FFN if experts else None, moe_router_topk=2, expert_model_parallel_size=ep,
            gated_linear_unit=True, add_bias_linear=False, normalization="RMSNorm", use_cpu_initialization=True, pipeline_dtype=dtype,
            params_dtype=dtype, bf16=dtype == torch.bfloat16, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
            gradient_accumulation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False, bias_activation_fusion=False)
        self.plain = GPTModel(
            config=config, transformer_layer_spec=get_gpt_layer_local_spec(experts, False, normalization="RMSNorm"), vocab_size=self.rows,
            max_sequence_length=12, pre_process=self.pp_rank == 0, post_process=self.pp_rank == pp - 1,
            share_embeddings_and_output_weights=tied, position_embedding_type="rope")
        with torch.no_grad():
            for name, parameter in self.plain.named_parameters():
                parameter.copy_(self.fill(name, parameter.shape))
        wrapped = Float16Module(config, self.plain) if dtype == torch.bfloat16 else self.plain
        sums = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=bucket is not None, bucket_size=bucket,
                                             grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(config, sums, wrapped)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=1e-4, use_distributed_optimizer=True, bf16=dtype == torch.bfloat16, params_dtype=dtype),
            [self.model])
        self.fill_state()

    def fill(self, name, shape, kind=""):
        """This rank's part of a tensor of the whole model."""
        each = LAYERS // self.pp
        name = re.sub(r"layers\.(\d+)", lambda layer: f"layers.{int(layer[1]) + self.pp_rank * each}", name)
        name = re.sub(r"local_experts\.(\d+)", lambda expert: f"local_experts.{int(expert[1]) + self.ep_rank * (EXPERTS // self.ep)}", name)
        if name == "output_layer.weight" and self.tied:
            name = "embedding.word_embeddings.weight"

        def whole(*shape):
            generator = torch.Generator().manual_seed(sum((kind + name).encode()) * 7919 + len(name))
            return torch.randn(shape, generator=generator)
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            rows = torch.zeros(self.rows, HIDDEN)
            rows[:VOCAB] = whole(VOCAB, HIDDEN)
            return rows.chunk(self.tp)[self.tp_rank]
        if "linear_qkv.weight" in name:
            return whole(shape[0] * self.tp, shape[1]).chunk(self.tp)[self.tp_rank]
        if "linear_fc1.weight" in name:
            return torch.cat([half.chunk(self.tp)[self.tp_rank] for half in whole(shape[0] * self.tp, shape[1]).chunk(2)])
        if "linear_proj.weight" in name or "linear_fc2.weight" in name:
            return whole(shape[0], shape[1] * self.tp).chunk(self.tp, 1)[self.tp_rank]
        return whole(*shape)

    def fill_state(self):
        """Each rank has a stretch of each parameter's state, or none."""
        for inner in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            inner._init_optimizer_states_with_dummy_values()
            for name, parameter in self.plain.named_parameters():
                if parameter not in inner.model_param_gbuf_map:
                    continue
                part = inner._get_model_param_range_map(parameter)["param"]
                state = inner._get_main_param_and_optimizer_states(parameter)
                for key in ("param", "exp_avg", "exp_avg_sq"):
                    values = self.fill(name, parameter.shape, "" if key == "param" else key)
                    state[key].data.copy_(values.flatten()[part.start:part.end])

    def arguments(self):
        return argparse.Namespace(
            num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=GROUPS, group_query_attention=True, swiglu=True,
            ffn_hidden_size=FFN, vocab_size=VOCAB, padded_vocab_size=self.rows, untie_embeddings_and_output_weights=not self.tied,
            tensor_model_parallel_size=self.tp, pipeline_model_parallel_size=self.pp, virtual_pipeline_model_parallel_size=None,
            expert_model_parallel_size=self.ep, expert_tensor_parallel_size=self.tp, context_parallel_size=1, num_experts=EXPERTS if self.ep > 1 else None,
            data_parallel_size=parallel_state.get_data_parallel_world_size(), overlap_grad_reduce=self.bucket is not None,
            ddp_bucket_size=self.bucket, ddp_num_buckets=None)

    def sharded(self, sharding, is_loading):
        """The state that `torch_dist` writes, and is loaded into."""
        metadata = {"distrib_optim_sharding_type": sharding, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        model = self.plain.sharded_state_dict(metadata=metadata)
        state = {"args": self.arguments(), "checkpoint_version": 3.0, "iteration": ITERATION, "model": model, "opt_param_scheduler": {"num_steps": 7}}
        if sharding != "none":
            state["optimizer"] = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        if is_loading:  # random states are of as many ranks as saved them: Megatron-LM leaves them out, too, under other sizes
            return state
        coordinates = (self.pp_rank, self.tp_rank)
        state["rng_state"] = ShardedObject("rng_state", [{"random": coordinates}], (self.pp, self.tp), coordinates,
                                           replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True))
        return state

    def save_dist(self, sharding):
        path = os.path.join(self.top, f"iter_{ITERATION:07d}")
        if torch.distributed.get_rank() == 0:
            os.makedirs(path)
        torch.distributed.barrier()
        dist_checkpointing.save(self.sharded(sharding, False), path, ("torch_dist", 1))
        if torch.distributed.get_rank() == 0:
            with open(self.top + "/latest_checkpointed_iteration.txt", "w", encoding="utf-8") as file:
                file.write(str(ITERATION))

    def compare(self, found, name, kind=""):
        """With what `fill` gives; of a vocabulary without its padding."""
        wanted = self.fill(name, found.shape, kind).to(found.dtype)
        rows = len(wanted)
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            rows = max(0, min(VOCAB - self.tp_rank * rows, rows))
        assert torch.equal(found[:rows], wanted[:rows]), (name, kind)

    def load_dist(self, sharding):
        """Into a model of zeros; compares all that Megatron puts into its places."""
        with torch.no_grad():
            for parameter in self.plain.parameters():
                parameter.zero_()
        found = dist_checkpointing.load(self.sharded(sharding, True), self.top)
        assert found["iteration"] == ITERATION and found["opt_param_scheduler"] == {"num_steps": 7}
        self.plain.load_state_dict(found["model"])
        names = {parameter: name for name, parameter in self.plain.named_parameters()}
        for parameter, name in names.items():
            self.compare(parameter, name)
        if sharding == "none":
            return
        # As Megatron numbers them; its own loader stumbles over the "step" of PyTorch's Adam.
        chained = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        for number, inner in enumerate(chained):
            state = (found["optimizer"][number] if len(chained) > 1 else found["optimizer"])["param_state"]
            parameters = [parameter for buffer in inner.buffers for parameter in buffer.param_index_map]
            assert len(parameters) == len(state) > 0, (len(parameters), len(state))
            for position, parameter in enumerate(parameters):
                for key in ("param", "exp_avg", "exp_avg_sq"):
                    self.compare(state[position][key].reshape(parameter.shape), names[parameter], "" if key == "param" else key)

    def save(self):
        name = f"mp_rank_{self.tp_rank:02d}" + (f"_{self.pp_rank:03d}" if self.pp > 1 else "") + (f"_{self.ep_rank:03d}" if self.ep > 1 else "")
        path = os.path.join(self.top, f"iter_{ITERATION:07d}", name)
        os.makedirs(path, exist_ok=True)
        self.optimizer.save_parameter_state(path + "/distrib_optim.pt")
        if parallel_state.get_expert_data_parallel_rank() > 0:
            return
        torch.save({"args": self.arguments(), "checkpoint_version": 3.0, "iteration": ITERATION, "model": self.plain.state_dict_for_save_checkpoint(),
                    "optimizer": self.optimizer.state_dict(), "opt_param_scheduler": {}}, path + "/model_optim_rng.pt")
        if torch.distributed.get_rank() == 0:
            with open(self.top + "/latest_checkpointed_iteration.txt", "w", encoding="utf-8") as file:
                file.write(str(ITERATION))


def main(action, top, tp, pp, ep, dtype, tied, bucket, sharding="-"):
    rank = Rank(top, int(tp), int(pp), int(ep), getattr(torch, dtype), tied == "tied", int(bucket) if bucket != "-" else None)
    if action == "load":
        rank.load_dist(sharding)
    elif sharding != "-":
        rank.save_dist(sharding)
    else:
        rank.save()
    torch.distributed.barrier()
    if sharding != "-":  # its checkpointing leaves processes and threads that do not end
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
