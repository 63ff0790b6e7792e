"""Trees that Megatron-Core itself wrote, with its distributed optimizer, on the CPU (megatron_ranks.py): what a layout has of one of
them is what Megatron writes when it runs under that layout."""
import argparse
import importlib.util
import itertools
import os
import socket
import subprocess
import sys

import mount

torch = mount.require("torch")
if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    mount.skip("Python has no megatron.core here (build/venv/bin/pip install megatron-core==0.16.1)")

HERE = os.path.dirname(os.path.abspath(__file__))


class MegatronCore(mount.TestCase):
    def write(self, name, tp, pp, dp, ep=1, dtype="float32", tied=False, bucket=None):
        """The tree that so many ranks write."""
        top = self.temporary(name)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        world = tp * pp * dp
        variables = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", os.path.join(HERE, "megatron_ranks.py"), top, str(tp), str(pp), str(ep), dtype,
                   "tied" if tied else "untied", "-" if bucket is None else str(bucket)]
        processes = [subprocess.Popen(command, env={**variables, "RANK": str(rank)}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
                     for rank in range(world)]
        said = [process.communicate(timeout=300)[1].decode() for process in processes]
        self.assertEqual([process.returncode for process in processes], [0] * world, "\n".join(said))
        return top

    def load(self, path):
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, weights_only=True)

    def expect_same(self, found, wanted, at):
        if isinstance(wanted, dict):
            self.assertEqual(sorted(found, key=str), sorted(wanted, key=str), at)
            for key, value in wanted.items():
                self.expect_same(found[key], value, f"{at} {key}")
        elif isinstance(wanted, torch.Tensor):
            self.assertEqual((found.dtype, found.shape), (wanted.dtype, wanted.shape), at)
            self.assertTrue(torch.equal(found, wanted), at)
        else:
            self.assertEqual(found, wanted, at)

    def compare(self, name, layouts, **how):
        trees = {sizes: self.write(f"{name}-{number}", *sizes, **how) for number, sizes in enumerate(layouts)}
        job = self.mount.job(name)
        self.mount.ptc("import", name, trees[layouts[0]], "--name", "base")
        for (tp, pp, dp), top in trees.items():
            for tp_rank, pp_rank in itertools.product(range(tp), range(pp)):
                rank = f"iter_0000100/mp_rank_{tp_rank:02d}" + (f"_{pp_rank:03d}" if pp > 1 else "")
                layout = job.checkpoint("base", "layouts", f"tp{tp}-pp{pp}-dp{dp}", "megatron", rank)
                found, wanted = (self.load(at + "/model_optim_rng.pt")["model"] for at in (layout, os.path.join(top, rank)))
                self.assertEqual([key for key, value in found.items() if value is not None],
                                 [key for key, value in wanted.items() if value is not None])
                self.expect_same({**found}, {**wanted}, f"{name} {layout}")
                self.expect_same(*(self.load(at + "/distrib_optim.pt") for at in (layout, os.path.join(top, rank))), f"{name} {layout}")

    def test_one_bucket(self):
        self.compare("one", ((2, 2, 1), (1, 1, 3)))

    def test_tied_of_sixteen_bits_in_several_buckets(self):
        self.compare("several", ((1, 2, 2), (4, 1, 1), (1, 1, 1)), dtype="bfloat16", tied=True, bucket=500)

    def test_expert_ranks(self):
        """What is no expert's only the first of them writes; each has it in what is made anew."""
        trees = {pp: self.write(f"experts-{pp}", 1, pp, 2, ep=2) for pp in (1, 2)}
        job = self.mount.job("experts")
        self.mount.ptc("import", "experts", trees[1], "--name", "base")
        for (pp, top), ep_rank in itertools.product(trees.items(), range(2)):
            for pp_rank in range(pp):
                rank = "iter_0000100/mp_rank_00" + (f"_{pp_rank:03d}" if pp > 1 else "") + f"_{ep_rank:03d}"
                layout = job.checkpoint("base", "layouts", f"tp1-pp{pp}-dp1-ep2", "megatron", rank)
                found, wanted = (self.load(at + "/distrib_optim.pt") for at in (layout, os.path.join(top, rank)))
                self.assertEqual(wanted[0] is None, ep_rank > 0)
                for optimizer in range(ep_rank, 2):
                    self.expect_same(found[optimizer], wanted[optimizer], f"{layout} {optimizer}")
                found, wanted = (self.load(at + "/model_optim_rng.pt")["model"] for at in (layout, os.path.join(top, rank)))
                self.expect_same({**found}, {**wanted}, layout)


if __name__ == "__main__":
    mount.main()
