"""Techniques that carry a job out, in one layout and another: its loss is that of one process, to the end of its samples."""
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import mount

HERE = os.path.dirname(os.path.abspath(__file__))
TECHNIQUES = os.path.join(HERE, "../../tools/planner/library/techniques")
torch = mount.require("torch")
PLANNED = os.path.join(HERE, "../../tools/examples/planned")
sys.path[:0] = [os.path.join(HERE, "../../tools/python"), PLANNED]
import ptc  # noqa: E402  pylint: disable=wrong-import-position
import ptc.training  # noqa: E402  pylint: disable=wrong-import-position
import model as program  # noqa: E402  pylint: disable=wrong-import-position

BATCH = 8


class Execute(mount.TestCase):
    def new(self, samples):
        """A job whose state nobody has saved yet; (it, its samples in order)."""
        os.mkdir(self.temporary("samples"))
        draw = torch.Generator().manual_seed(3)
        with open(self.temporary("samples/s.jsonl"), "w", encoding="utf-8") as file:
            for tokens in torch.randint(64, (samples, 9), generator=draw).tolist():
                file.write(json.dumps({"tokens": tokens}) + "\n")
        job = ptc.Job.create(os.path.join(self.mount.path, self.id().rsplit(".", 1)[-1]))
        for name, content in (("source", {"shards": self.temporary("samples")}), ("order", {"batch": BATCH, "seed": 7})):
            with open(job.file(f"dataset/{name}.json"), "w", encoding="utf-8") as file:
                json.dump(content, file)
        while not os.path.lexists(job.file("dataset/head")):
            time.sleep(0.05)
        return job, [json.loads(line) for line in ptc.training.Samples.read(job, 0)]

    @staticmethod
    def lay_out(job, **layout):
        job.set_layout({"format": "ptc-layout/1", "tp": 1, "pp": 1, "dp": 1, **layout})

    @staticmethod
    def alone(samples):
        """The losses of one process."""
        torch.manual_seed(0)
        model = program.model()
        optimizer = program.optimizer(model.parameters())
        for begin in range(0, len(samples), BATCH):
            optimizer.zero_grad()
            loss = program.loss(model, program.samples(samples[begin:begin + BATCH]))
            loss.backward()
            optimizer.step()
            yield loss.item()

    def start(self, technique, job, gpus=2, **more):
        asked = {"job": job.path, "batch": BATCH, "gpus": gpus, "trial": {"program": program.__file__},
                 "log": self.temporary("log"), **more}
        process = subprocess.Popen([sys.executable, "-B", os.path.join(TECHNIQUES, technique), "execute"], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        process.stdin.write(json.dumps(asked))
        process.stdin.close()
        process.stdin = None
        return process

    def end(self, process, code=0):
        told, said = process.communicate(timeout=120)
        self.assertEqual(process.returncode, code, told + said)
        return json.loads(told.splitlines()[-1])

    def execute(self, technique, job, code=0, **more):
        return self.end(self.start(technique, job, **more), code)

    def log(self):
        if not os.path.exists(self.temporary("log")):
            return []
        return [json.loads(line) for line in mount.read_text(self.temporary("log")).splitlines()]

    def compare(self, samples):
        made = self.log()
        self.assertEqual([one["step"] for one in made], list(range(1, len(made) + 1)))
        for one, loss in zip(made, self.alone(samples)):
            self.assertLess(abs(one["loss"] - loss), 1e-4 * loss, one)
        return made

    def test_one_after_the_other(self):
        job, samples = self.new(4000)
        steps = 0
        for technique, layout in (("ddp", {"dp": 2}), ("tensor", {"tp": 2}), ("fsdp", {"dp": 2, "optimizer": "fsdp"}),
                                  ("offload", {"dp": 2, "optimizer": "fsdp"}), ("gpipe", {"pp": 2})):
            with self.subTest(technique):
                self.lay_out(job, **layout)
                told = self.execute(technique, job, batches=3)
                steps += 3
                self.assertEqual((told["step"], told["consumed"], told["ended"]), (steps, steps * BATCH, "batches"))
                self.assertEqual(mount.read_text(job.file("dataset/consumed")).strip(), str(steps * BATCH))
                self.assertEqual(job.checkpoints()[-1], f"step{steps:05}")
        with self.subTest("asked to end"):
            self.lay_out(job, dp=2)
            running = self.start("ddp", job)
            while len(self.log()) < steps + 3:
                self.assertIsNone(running.poll())
                time.sleep(0.02)
            running.send_signal(signal.SIGTERM)
            told = self.end(running)
            self.assertEqual(told["ended"], "asked")
            self.assertEqual(told["step"], self.log()[-1]["step"])
            self.assertEqual(job.checkpoints()[-1], f"step{told['step']:05}")
        self.compare(samples)
        with self.subTest("from an older checkpoint"):
            shutil.move(self.temporary("log"), self.temporary("before"))
            told = self.execute("ddp", job, **{"from": job.file("checkpoints/step00003/layouts/tp1-pp1-dp2")}, batches=1)
            before = [json.loads(line) for line in mount.read_text(self.temporary("before")).splitlines()]
            self.assertEqual(told["step"], 4)
            self.assertLess(abs(told["loss"] - before[3]["loss"]), 1e-4)

    def test_to_the_end_of_the_data(self):
        """Of whose last batch a rank has nothing."""
        job, samples = self.new(17)
        self.lay_out(job, dp=2)
        told = self.execute("accumulation", job, save_every=1)
        self.assertEqual((told["step"], told["consumed"], told["ended"]), (3, 17, "consumed"))
        self.assertEqual([one["batch"] for one in self.compare(samples)], [8, 8, 1])
        self.assertEqual(self.execute("accumulation", job)["ended"], "consumed")

    def test_there_is_none_because(self):
        job, _ = self.new(64)
        self.lay_out(job, tp=2)
        self.assertIn("its layout has tp2, which this technique has not", self.execute("ddp", job, code=1)["none"])
        self.assertIn("its layout has tp2-pp1-dp1, and there are 4 GPUs", self.execute("tensor", job, code=1, gpus=4)["none"])
        self.assertIn("order.json has batches of 8, and not 16", self.execute("tensor", job, code=1, batch=16)["none"])
        self.assertEqual(job.checkpoints(), [])

    def test_a_batch_that_ranks_cannot_share(self):
        job, _ = self.new(64)
        with open(job.file("dataset/order.json"), "w", encoding="utf-8") as file:
            json.dump({"batch": BATCH, "seed": 7, "uneven": True}, file)
        self.lay_out(job, dp=3)
        deadline = time.monotonic() + 30
        while job.read_json("dataset/plan.json")["segments"][-1]["dp"] != 3:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.02)
        with self.assertRaisesRegex(ValueError, "3 ranks cannot share a batch of 8 evenly"):
            ptc.training.Samples(job, 0, 3)

    def test_what_readme_says(self):
        """From jobs.json to a running cluster."""
        readme = mount.read_text(os.path.join(HERE, "../../tools/planner/README.md"))
        first, inside, *lines = readme.partition("## From jobs.json")[2].split("```")[1].strip().splitlines()
        self.assertTrue(first.startswith("ptcfs ") and inside.startswith("cd "))
        directory = self.temporary("planned")
        shutil.copytree(PLANNED, directory)
        path = os.pathsep.join([mount.bin_dir(), os.path.dirname(sys.executable), os.environ["PATH"]])
        said = {}
        for line in lines:
            done = subprocess.run(line.replace("/mnt/ptc", self.mount.path), shell=True, cwd=directory, capture_output=True, text=True,
                                  check=False, timeout=300, env={**os.environ, "PATH": path, "PTC_TECHNIQUES": os.path.abspath(TECHNIQUES)})
            self.assertEqual(done.returncode, 0, f"{line}: {done.stdout}{done.stderr}")
            said[line.split("#")[0].strip()] = done.stdout
        ran = said["ptc -C /mnt/ptc autoscale jobs.json --until-done"]
        for name, samples in (("first", 4000), ("second", 2000)):
            self.assertIn(f"{name}: it has ended, {samples} of {samples} samples consumed", ran)
            self.assertTrue(os.listdir(os.path.join(self.mount.path, name, "current/rank")))


if __name__ == "__main__":
    mount.main()
