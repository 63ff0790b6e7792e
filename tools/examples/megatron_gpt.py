"""One rank of Megatron-Core, on the CPU: GPTModel, its schedules, its distributed optimizer. It saves and loads what
Megatron-LM does with `--ckpt-format torch`, and knows nothing of ptcfs but where that lies: below incoming/, and below
megatron/ of the layout in force.

Its samples, its log and how it ends are train.py's.
"""
import argparse
import os

import torch
import torch.distributed as dist

import megatron_cpu  # noqa: F401  before Megatron  pylint: disable=unused-import
import ptc
import train
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

PRELOAD = ["megatron_gpt"]
LAYERS, HIDDEN, HEADS, GROUPS, FFN, VOCAB, LENGTH = 4, 64, 4, 4, 128, 512, 32


class Megatron:
    def __init__(self, layout):
        tp, pp = layout["tp"], layout["pp"]
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tp, pp)
        self.tp, self.tp_size = parallel_state.get_tensor_model_parallel_rank(), tp
        self.pp, self.pp_size = parallel_state.get_pipeline_model_parallel_rank(), pp
        self.dp, self.dp_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        self.logs = self.tp == 0 and self.pp == pp - 1
        self.config = TransformerConfig(
            num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=GROUPS, ffn_hidden_size=FFN,
            gated_linear_unit=True, add_bias_linear=False, normalization="RMSNorm", hidden_dropout=0.0, attention_dropout=0.0,
            tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, params_dtype=torch.float32, pipeline_dtype=torch.float32,
            use_cpu_initialization=True, gradient_accumulation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
            bias_activation_fusion=False)
        self.model = GPTModel(
            config=self.config, transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=VOCAB,
            max_sequence_length=LENGTH, pre_process=self.pp == 0, post_process=self.pp == pp - 1,
            share_embeddings_and_output_weights=False, position_embedding_type="rope")
        self.wrapped = DistributedDataParallel(
            self.config, DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True), self.model)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(optimizer="adam", lr=2e-3, min_lr=2e-3, adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-6, weight_decay=0.1,
                            clip_grad=1.0, use_distributed_optimizer=True, params_dtype=torch.float32), [self.wrapped])
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss

    def inner(self):
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])

    def begin(self):
        """Moments are there, and zero: Megatron saves none that are not."""
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = 0.0
        for inner in self.inner():
            inner._init_optimizer_states_with_dummy_values()
        for group, rate in zip(groups, rates):
            group["lr"] = rate

    def step(self, samples, batch):
        """Of this data-parallel rank's samples; returns the mean over the whole batch, on the last stage."""
        def forward(data, model):
            _, tokens, targets = next(data)
            length = len(tokens)
            later = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
            losses = model(tokens[None], torch.arange(length)[None], later, labels=targets[None])
            return losses, lambda found: (found.mean(), {"loss": found.detach().mean()})
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward, data_iterator=iter(samples), model=[self.wrapped], num_microbatches=len(samples),
            seq_length=LENGTH, micro_batch_size=1, forward_only=False)
        self.optimizer.step()
        loss = torch.stack([one["loss"] for one in losses]).sum() if losses else torch.zeros(())
        dist.all_reduce(loss, group=parallel_state.get_data_parallel_group())
        return loss / batch

    # ---- Megatron's files ----

    def directory(self, top, iteration):
        rank = f"mp_rank_{self.tp:02d}" + (f"_{self.pp:03d}" if self.pp_size > 1 else "")
        return os.path.join(top, f"iter_{iteration:07d}", rank)

    def load(self, checkpoint):
        """(steps made, samples consumed)"""
        top = os.path.join(checkpoint, "megatron")
        with open(os.path.join(top, "latest_checkpointed_iteration.txt"), encoding="utf-8") as file:
            path = self.directory(top, int(file.read()))
        with torch.serialization.safe_globals([argparse.Namespace]):
            state = torch.load(path + "/model_optim_rng.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        # Where there is no Apex, Adam is PyTorch's, which counts steps in a tensor for each parameter; its files have none.
        states = [one for inner in self.inner() for one in inner.optimizer.state.values()]
        counts = [one.pop("step") for one in states]
        with torch.no_grad():  # where parameters are fp32, the optimizer's are views of them
            self.optimizer.load_parameter_state(path + "/distrib_optim.pt")
        for one, count in zip(states, counts):
            one["step"] = count.clone()
        return state["iteration"], state["args"].consumed_train_samples

    def save(self, job, layout, step, consumed):
        """All ranks' files, and then the commit, by which they are a checkpoint."""
        top = job.begin(f"step{step:05}")
        path = self.directory(top, step)
        os.makedirs(path, exist_ok=True)
        self.optimizer.save_parameter_state(path + "/distrib_optim.pt")
        if self.dp == 0:
            arguments = argparse.Namespace(
                num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=GROUPS, group_query_attention=True,
                swiglu=True, ffn_hidden_size=FFN, vocab_size=VOCAB, padded_vocab_size=VOCAB, untie_embeddings_and_output_weights=True,
                tensor_model_parallel_size=self.tp_size, pipeline_model_parallel_size=self.pp_size,
                virtual_pipeline_model_parallel_size=None, expert_model_parallel_size=1, expert_tensor_parallel_size=self.tp_size,
                context_parallel_size=1, num_experts=None, data_parallel_size=self.dp_size, overlap_grad_reduce=False,
                ddp_bucket_size=None, ddp_num_buckets=None, consumed_train_samples=consumed)
            torch.save({"args": arguments, "checkpoint_version": 3.0, "iteration": step, "model": self.model.state_dict_for_save_checkpoint(),
                        "optimizer": self.optimizer.state_dict(), "opt_param_scheduler": {}}, path + "/model_optim_rng.pt")
        if dist.get_rank() == 0:
            for name, number in (("latest_checkpointed_iteration.txt", step), ("consumed", consumed)):
                with open(os.path.join(top, name), "w", encoding="utf-8") as file:
                    file.write(str(number))
        ptc.commit(top)


def first():
    """One process with a model that has learned nothing."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.manual_seed(7)
    trainer = Megatron({"tp": 1, "pp": 1})
    trainer.begin()
    return trainer


def main(rank, world, job, layout, checkpoint, meet, log):
    """As train.main."""
    train.run(Megatron, rank, world, job, layout, checkpoint, meet, log)
