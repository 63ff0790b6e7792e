"""Layouts there and back: every rank's file is what the rules say, and the first one's return."""
import hashlib
import os

import models
import mount


def digest(path):
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


class RoundTrip(mount.TestCase):
    def check_layout(self, job, model, tp, pp, dp=1):
        spec = f"tp{tp}-pp{pp}-dp{dp}"
        for rank in range(tp * pp * dp):
            held = {t.name: t for t in model.rank_tensors(tp, pp, rank % tp, rank // (tp * dp))}
            found = models.read_safetensors(job.rank_file("base", spec, rank))
            self.assertEqual(set(found), set(held), f"{spec} rank {rank}")
            for name, tensor in held.items():
                self.assertEqual(found[name], tensor, f"{spec} rank {rank}: {name}")

    def digests(self, job, spec, ranks):
        return [digest(job.rank_file("base", spec, rank)) for rank in range(ranks)]

    def check_round_trip(self, model, tp, pp, others):
        job = self.new_job()
        job.set_layout(tp=tp, pp=pp)
        model.write_ranks(job.incoming("base"), tp, pp)
        written = [digest(f"{job.incoming('base')}/rank/{rank}/model.safetensors")
                   for rank in range(tp * pp)]
        job.commit("base")
        spec = f"tp{tp}-pp{pp}-dp1"
        self.assertEqual(self.digests(job, spec, tp * pp), written, "the written files themselves")
        for other in others:
            self.check_layout(job, model, *other)  # computed on read
            job.set_layout(**dict(zip(("tp", "pp", "dp"), other)))
            self.check_layout(job, model, *other)  # materialised
            self.assertEqual(self.digests(job, spec, tp * pp), written, "computed on read")
        job.set_layout(tp=tp, pp=pp)
        self.assertEqual(self.digests(job, spec, tp * pp), written, "there and back")
        for tensor in model.tensors:
            path = job.checkpoint("base", "model", tensor.name.replace(".", "/") + ".npy")
            self.assertEqual(models.read_npy(path), (tensor.shape, tensor.data), tensor.name)

    def test_llama(self):
        self.check_round_trip(models.Llama(), 2, 2, [(1, 1), (4, 1), (8, 5), (2, 3)])

    def test_gpt2(self):
        self.check_round_trip(models.Gpt2(), 2, 1, [(4, 3), (1, 2), (1, 1)])

    def test_bert(self):
        self.check_round_trip(models.Bert(), 4, 1, [(2, 2), (1, 3)])

    def test_replicas(self):
        model = models.Bert()
        job = self.new_job()
        model.write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        job.set_layout(tp=2, pp=1, dp=3)
        self.check_layout(job, model, 2, 1, 3)

    def test_stages_given(self):
        model = models.Llama()
        job = self.new_job()
        model.write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        job.set_layout(tp=1, pp=2, stages=[1, 4])
        first = models.read_safetensors(job.file("current/rank/0/model.safetensors"))
        self.assertEqual({model.layer_of(name) for name in first}, {None, 0})
        second = models.read_safetensors(job.file("current/rank/1/model.safetensors"))
        self.assertEqual({model.layer_of(name) for name in second}, {None, 1, 2, 3, 4})

    def test_after_kill_and_restart(self):
        model = models.Llama()
        job = self.new_job()
        model.write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        job.set_layout(tp=2, pp=2)
        self.mount.stop(kill=True)
        self.mount.start()
        self.assertEqual(job.wait()["layout"], "tp2-pp2-dp1")
        self.check_layout(job, model, 2, 2)
        self.mount.stop()
        self.mount.start()
        self.check_layout(job, model, 2, 2)


if __name__ == "__main__":
    mount.main()
