"""layouts/vllm-tp<N>/serve/, loaded by vLLM itself (vllm_ranks.py), of a small model of each type that reshard/serve knows.

    VLLM_ONLY=llama,mixtral python3 test_vllm.py
"""
import os
import socket
import subprocess
import sys

import mount

torch = mount.require("torch")
mount.require("transformers")
mount.require("vllm")
import transformers  # noqa: E402  pylint: disable=wrong-import-position

HERE = os.path.dirname(os.path.abspath(__file__))
SIZES = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Models with experts first: vLLM makes the groups of ranks for them when the first model has some.
MODELS = {
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, **EXPERTS},
    "mixtral": {"num_local_experts": 4},
    "glm4_moe": {"head_dim": 16, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 1,
                 "topk_group": 1, **EXPERTS},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1, **EXPERTS},
    "llama": {}, "mistral": {"num_key_value_heads": 1}, "qwen2": {"tie_word_embeddings": True}, "qwen3": {"head_dim": 16}, "phi3": {},
    "gemma2": {"head_dim": 16}, "gemma3_text": {"head_dim": 16}, "olmo2": {}, "cohere": {}, "granite": {},
    "smollm3": {"tie_word_embeddings": True}, "seed_oss": {"head_dim": 16}, "starcoder2": {"tie_word_embeddings": True},
}
# That are tried in two stages, too. Of gemma3_text vLLM's first stage has no array with the embedding's name, and its loader gives up.
STAGES = [name for name in MODELS if name != "gemma3_text"]


class Vllm(mount.TestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        only = os.environ.get("VLLM_ONLY")
        cls.names = [name for name in MODELS if not only or name in only.split(",")]
        torch.manual_seed(1)
        for name in cls.names:
            config = transformers.AutoConfig.for_model(name, **{**SIZES, **MODELS[name]})
            config.dtype = torch.bfloat16
            model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_()
            job = cls.mount.job(name)
            model.save_pretrained(job.incoming("base") + "/rank/0")
            job.commit("base")

    def check(self, names, layout, tp, pp):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        triples = []
        for name in names:
            job = mount.Job(self.mount, name)
            triples += [name, job.checkpoint("base", "hf"), job.checkpoint("base", "layouts", layout, "serve")]
        ranks = [subprocess.Popen([sys.executable, "-B", HERE + "/vllm_ranks.py", str(rank), str(tp), str(pp), str(port), *triples],
                                  stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for rank in range(tp * pp)]
        for rank, process in enumerate(ranks):
            said = dict(line.split(" ", 1) for line in process.communicate()[0].splitlines() if " " in line)
            for name in names:
                with self.subTest(name=name, rank=rank, layout=layout):
                    self.assertRegex(said.get(name, "nothing"), r"^equal \d+$")

    def test_each_worker_loads_its_own(self):
        self.check(self.names, "vllm-tp2", 2, 1)

    def test_stages(self):
        self.check([name for name in STAGES if name in self.names], "vllm-tp1-pp2", 1, 2)


if __name__ == "__main__":
    mount.main()
