"""One rank of a model of Megatron-Core's on the CPU, saved as Megatron-LM saves with `--ckpt-format torch`, without an optimizer. What
of the whole each parameter is, its modules say themselves (sharded_state_dict), and the whole's numbers depend on its name alone. Run
by test_megatron_core.py: megatron_models.py KIND TOP TP PP [EP ETP VPP], with torchrun's variables."""
import argparse
import os
import sys

import torch

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tools/examples"))
import megatron_cpu  # noqa: F401,E402  pylint: disable=unused-import,wrong-import-position
from megatron.core import parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory  # noqa: E402
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec  # noqa: E402
from megatron.core.models.bert.bert_model import BertModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.models.T5.t5_model import T5Model  # noqa: E402
from megatron.core.models.T5.t5_spec import get_t5_decoder_with_local_block_spec, get_t5_encoder_with_local_block_spec  # noqa: E402
from megatron.core.transformer.moe import grouped_gemm_util  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

#: Without it GroupedMLP cannot be made; no forward is run here.
grouped_gemm_util.assert_grouped_gemm_is_available = lambda: None
HIDDEN, HEADS, GROUPS, FFN, VOCAB, LENGTH, EXPERTS = 16, 4, 2, 24, 512, 12, 4


def build(kind, tp, pp, ep=1, etp=None, vpp=None, chunk=None):
    """The model, or one stretch of a stage's layers, and what Megatron-LM's args would say of it."""
    experts = kind in ("experts", "grouped", "grouped-plain")
    gated, layers = kind in ("mtp", "experts", "grouped"), 4 if experts or kind == "stretches" else 2
    options = {"softmax_type": "learnable"} if kind == "sinks" else {}
    if gated:
        options = {"num_query_groups": GROUPS, "gated_linear_unit": True, "add_bias_linear": False, "normalization": "RMSNorm",
                   **({"mtp_num_layers": 2} if kind == "mtp" else {})}
    if experts:
        options["add_bias_linear"] = False
        options.update(num_moe_experts=EXPERTS, moe_ffn_hidden_size=FFN, moe_router_topk=2, expert_model_parallel_size=ep,
                       expert_tensor_parallel_size=etp or tp)
    if vpp:
        options["virtual_pipeline_model_parallel_size"] = vpp
    config = TransformerConfig(
        num_layers=layers, hidden_size=HIDDEN, num_attention_heads=HEADS, ffn_hidden_size=FFN, use_cpu_initialization=True,
        pipeline_dtype=torch.float32, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, gradient_accumulation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, bias_activation_fusion=False, **options)
    first, last = (is_there(**({"ignore_virtual": False, "vp_stage": chunk} if vpp else {})) for is_there in (
        parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage))
    common = {"config": config, "vocab_size": VOCAB, "max_sequence_length": LENGTH, "pre_process": first, "post_process": last}
    if kind == "bert":
        model = BertModel(transformer_layer_spec=bert_layer_local_spec, num_tokentypes=2, add_binary_head=True,
                          share_embeddings_and_output_weights=True, **common)
    elif kind.startswith("t5"):
        places = "relative" if kind == "t5-relative" else "learned_absolute"
        model = T5Model(encoder_config=config, transformer_encoder_layer_spec=get_t5_encoder_with_local_block_spec(layers),
                        transformer_decoder_layer_spec=get_t5_decoder_with_local_block_spec(layers), position_embedding_type=places,
                        relative_attention_num_buckets=8, relative_attention_max_distance=16, **common)
    else:
        spec = get_gpt_layer_local_spec(EXPERTS if experts else None, kind.startswith("grouped"),
                                        **({"normalization": "RMSNorm"} if gated else {}))
        further = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if kind == "mtp" and last else None
        model = GPTModel(transformer_layer_spec=spec, mtp_block_spec=further, share_embeddings_and_output_weights=False,
                         position_embedding_type="learned_absolute", **common, **({"vp_stage": chunk} if vpp else {}))
    return model, argparse.Namespace(
        num_layers=layers, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=GROUPS if gated else None,
        group_query_attention=gated, swiglu=gated, vocab_size=VOCAB, padded_vocab_size=VOCAB,
        untie_embeddings_and_output_weights=kind != "bert", tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp, num_experts=EXPERTS if experts else None,
        expert_model_parallel_size=ep, expert_tensor_parallel_size=etp or tp)


def shards(state):
    for value in state.values() if isinstance(state, dict) else state:
        if isinstance(value, (dict, list)):
            yield from shards(value)
        elif isinstance(value, ShardedTensor):
            yield value


def fill_shard(shard):
    generator = torch.Generator().manual_seed(sum(shard.key.encode()) * 7919 + len(shard.key))
    part = torch.randn(shard.global_shape, generator=generator)
    own = len(shard.global_shape) - len(shard.local_shape)  # axes before: of layers
    for layer in shard.global_offset[:own]:
        part = part[layer]
    for axis, length in enumerate(shard.local_shape):
        part = part.narrow(axis, shard.global_offset[axis + own], length)
    shard.data.copy_(part)


def fill(model):
    state = model.sharded_state_dict(metadata={"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)})
    with torch.no_grad():
        for value in state.values():
            if not isinstance(value, ShardedTensorFactory):
                continue
            built = value.build()  # may be copies, in another order
            for shard in shards([built]):
                fill_shard(shard)
            value.data.copy_(value.merge_fn([shard.data for shard in built] if isinstance(built, list) else built.data))
        for shard in shards({name: value for name, value in state.items() if not isinstance(value, ShardedTensorFactory)}):
            fill_shard(shard)


def main(kind, top, tp, pp, ep=1, etp=0, vpp=0):
    tp, pp, ep, etp, vpp = int(tp), int(pp), int(ep), int(etp) or None, int(vpp) or None
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tp, pp, vpp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    state = {"checkpoint_version": 3.0, "iteration": 100}
    for chunk in range(vpp or 1):
        if vpp:
            parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
        model, state["args"] = build(kind, tp, pp, ep, etp, vpp, chunk)
        fill(model)
        state[f"model{chunk}" if vpp else "model"] = model.state_dict_for_save_checkpoint()
    ranks = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
    path = os.path.join(top, "iter_0000100", f"mp_rank_{ranks[0]:02d}" + (f"_{ranks[1]:03d}" if pp > 1 else "") +
                        (f"_{parallel_state.get_expert_model_parallel_rank():03d}" if ep > 1 else ""))
    if parallel_state.get_expert_data_parallel_rank() == 0 if ep > 1 else parallel_state.get_data_parallel_rank() == 0:
        os.makedirs(path)
        torch.save(state, path + "/model_optim_rng.pt")
    torch.distributed.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
