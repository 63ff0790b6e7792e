"""Folders of DeepSpeed's beside each other, of which one counts; names and numbers of steps that a folder cannot have."""
import os

import models
import mount

torch = mount.require("torch")
import test_deepspeed_trees as trees  # noqa: E402  pylint: disable=wrong-import-position
from test_deepspeed_trees import KEYS, save, to_torch  # noqa: E402  pylint: disable=wrong-import-position

LAYOUT = "layouts/tp1-pp1-dp1/deepspeed"


def called(length):
    """A parameter's name of so many bytes, with dots in it."""
    return f"p{length}.{'n' * 90}.".ljust(length, "n")


class Folders(mount.TestCase):
    def setUp(self):
        super().setUp()
        self.model = models.Llama()

    def trained(self, seed):
        trained = trees.Trained(self.model)
        for key in KEYS:
            for name, tensor in trained.whole[key].items():
                value = (to_torch(tensor) + seed).numpy().tobytes()
                trained.whole[key][name] = models.Tensor(name, tensor.dtype, tensor.shape, value)
        return trained

    def refused(self, job, *reasons):
        before = mount.digests(job.incoming("base"))
        self.assertEqual(mount.error_of(job.commit, "base"), "ECANCELED")
        for reason in reasons:
            self.assertIn(reason, job.commit_error("base"))
        self.assertEqual(mount.digests(job.incoming("base")), before)

    def expect(self, job, trained, tag):
        """What counts is `trained`; returns what its optimizer says of all parameters."""
        top = job.checkpoint("base", LAYOUT)
        self.assertEqual(mount.read_text(top + "/latest_universal"), tag)
        self.assertEqual(sorted(set(os.listdir(top)) - {"LEFT_OUT.txt"}), [tag, "latest_universal"])
        for name in trained.shapes:
            for key in KEYS:
                found = torch.load(f"{top}/{tag}/zero/{name}/{key}.pt", weights_only=True)
                self.assertTrue(torch.equal(found["param"], to_torch(trained.whole[key][name])), (name, key))
        done = self.mount.ptc("verify", job.path)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        with torch.serialization.safe_globals([trees.LossScaler]):
            return torch.load(f"{top}/{tag}/zero/optimizer_state.pt", weights_only=True)

    def test_the_one_that_latest_names(self):
        older, newer = self.trained(1), self.trained(2)
        cases = ("global_step20\n", newer, "global_step10"), ("global_step10", older, "global_step20")
        for number, (named, counts, other) in enumerate(cases):
            with self.subTest(named=named):
                job = self.mount.job(f"latest-{number}")
                top = job.incoming("base")
                for tag, trained in (("global_step10", older), ("global_step20", newer)):
                    trained.save_flat(lambda rank, tag=tag: f"{top}/{tag}", 2)
                models.write_file(top + "/latest", named)
                models.write_file(top + "/config.json", self.model.config_text())
                before = mount.digests(f"{top}/{other}")
                job.commit("base")
                optimizer = self.expect(job, counts, "global_step100")  # as the model's file says
                self.assertEqual(optimizer["param_groups"][0]["lr"], 0.25)
                for below in ("hf", "layouts/tp1-pp1-dp1/rank/0"):
                    self.assertEqual(mount.digests(job.checkpoint("base", below, other)), before)
                # What was not read is not what the engine gets for its model.
                state = torch.load(job.checkpoint("base", LAYOUT, "global_step100/mp_rank_00_model_states.pt"), weights_only=True)
                self.assertEqual(state["module"], {})

    def test_the_universal_one_that_latest_names(self):
        """With what its own optimizer_state.pt says, whichever is the other."""
        for number, named in enumerate(("global_step10_universal", "global_step20_universal")):
            with self.subTest(named=named):
                job = self.mount.job(f"universal-{number}")
                top = job.incoming("base")
                for tag, seed in (("global_step10_universal", 1), ("global_step20_universal", 2)):
                    self.trained(seed).save_universal(f"{top}/{tag}")
                    save({"param_groups": [{"lr": seed / 8}]}, f"{top}/{tag}/zero/optimizer_state.pt")
                models.write_file(top + "/latest_universal", named)
                models.write_file(top + "/config.json", self.model.config_text())
                job.commit("base")
                self.assertEqual(self.expect(job, self.trained(number + 1), "global_step100")["param_groups"], [{"lr": (number + 1) / 8}])

    def test_a_universal_one_beside_that_which_it_was_made_of(self):
        job = self.new_job()
        top = job.incoming("base")
        flat = self.trained(1)
        flat.save_flat(lambda rank: top + "/global_step100", 2)
        self.trained(2).save_universal(top + "/global_step100_universal")
        save({"param_groups": [{"lr": 8}]}, top + "/global_step100_universal/zero/optimizer_state.pt")
        models.write_file(top + "/latest", "global_step100")
        models.write_file(top + "/latest_universal", "global_step100_universal")
        models.write_file(top + "/config.json", self.model.config_text())
        job.commit("base")
        self.assertEqual(self.expect(job, flat, "global_step100")["param_groups"][0]["lr"], 0.25)

    def test_refusals_of_two(self):
        def write(name, latest):
            job = self.mount.job(name)
            for tag in ("global_step10", "global_step20"):
                self.trained(1).save_flat(lambda rank: job.incoming("base") + "/" + tag, 1)  # pylint: disable=cell-var-from-loop
            for path, named in latest.items():
                models.write_file(f"{job.incoming('base')}/{path}", named)
            return job
        self.refused(write("unsaid", {}), "two checkpoints of DeepSpeed's: move one away, or have a file 'latest'")
        self.refused(write("gone", {"latest": "global_step30"}), "latest names 'global_step30/', and there is no checkpoint")
        self.refused(write("elsewhere", {"latest": "../global_step10"}), "latest names '../global_step10/', and there is no checkpoint")

    def test_steps_that_ranks_say_differently(self):
        for stage in (2, 3):
            with self.subTest(stage=stage):
                job, trained = self.mount.job(f"stage-{stage}"), self.trained(1)
                top = job.incoming("base") + "/global_step100"
                if stage == 3:
                    trained.save_stage_3(top, 2)
                else:
                    trained.save_flat(lambda rank: top, 2)  # pylint: disable=cell-var-from-loop
                file = top + "/zero_pp_rank_1_mp_rank_00_optim_states.pt"
                value = torch.load(file, weights_only=False)
                below = value["optimizer_state_dict"]["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]["state"]
                below[1]["step"] += 1
                torch.save(value, file)
                self.refused(job, "zero_pp_rank_1_mp_rank_00_optim_states.pt: its optimizer has taken another number of steps than",
                             "zero_pp_rank_0_mp_rank_00_optim_states.pt's")

    def test_steps_that_groups_say_differently(self):
        job, trained = self.new_job(), self.trained(1)
        top = job.incoming("base") + "/global_step100"
        trained.save_flat(lambda rank: top, 1)
        file = top + "/zero_pp_rank_0_mp_rank_00_optim_states.pt"
        value = torch.load(file, weights_only=False)
        value["optimizer_state_dict"]["base_optimizer_state"]["state"][1]["step"] += 1
        torch.save(value, file)
        job.commit("base")
        self.assertIn("the optimizer's groups have taken different numbers of steps.",
                      mount.read_text(job.checkpoint("base", LAYOUT, "LEFT_OUT.txt")))

    def test_steps_of_a_universal_one_that_differ(self):
        """Of tensors, as its own are; each parameter keeps its number."""
        job, trained = self.new_job(), self.trained(1)
        top = job.incoming("base") + "/global_step100_universal"
        trained.save_universal(top)
        for number, name in enumerate(trained.shapes):
            save(torch.tensor(7. + number // 3), f"{top}/zero/{name}/step.pt")
        models.write_file(job.incoming("base") + "/config.json", self.model.config_text())
        job.commit("base")
        self.expect(job, trained, "global_step100_universal")
        zero = job.checkpoint("base", LAYOUT, "global_step100_universal/zero")
        self.assertEqual([torch.load(f"{zero}/{name}/step.pt") for name in trained.shapes],
                         [torch.tensor(7. + number // 3) for number in range(len(trained.shapes))])
        self.assertIn("parameters have different ones. Stages 1 and 2 do not load",
                      mount.read_text(job.checkpoint("base", LAYOUT, "LEFT_OUT.txt")))

    def expect_each_name(self, top):
        """Every name that a directory shows can be looked up, and read."""
        for path, directories, files in os.walk(top):
            for name in directories + files:
                self.assertLessEqual(len(name), 255)
                os.stat(os.path.join(path, name))
        mount.digests(top)

    def test_a_parameter_with_a_file_s_name(self):
        job = self.new_job()
        save({"optimizer_state.pt": torch.ones(2, 2), "other": torch.zeros(2, 2)}, job.incoming("base") + "/pytorch_model.bin")
        job.commit("base")
        zero = job.checkpoint("base", LAYOUT, "global_step0/zero")
        self.assertEqual(sorted(os.listdir(zero)), ["optimizer_state.pt", "other"])
        self.assertIn("param_groups", torch.load(zero + "/optimizer_state.pt", weights_only=True))
        self.assertIn("1 tensor ('optimizer_state.pt'): its name is", mount.read_text(job.checkpoint("base", LAYOUT, "LEFT_OUT.txt")))

    def test_long_names(self):
        job = self.new_job()
        lengths = (*range(250, 260), 300)
        self.assertEqual([len(called(length)) for length in lengths], list(lengths))
        save({called(length): torch.full((2, 2), float(length)) for length in lengths}, job.incoming("base") + "/pytorch_model.bin")
        job.commit("base")
        self.expect_each_name(job.checkpoint("base"))
        self.assertEqual(set(os.listdir(job.checkpoint("base", LAYOUT, "global_step0/zero"))),
                         {"optimizer_state.pt"} | {called(length) for length in lengths if length <= 255})
        self.assertIn(f"5 tensors ('p256.nnn", mount.read_text(job.checkpoint("base", LAYOUT, "LEFT_OUT.txt")))

    def test_long_names_of_which_no_file_is_to_be_had(self):
        job = self.new_job()
        save({"n" * 252: torch.ones(2, 2)}, job.incoming("base") + "/pytorch_model.bin")
        self.refused(job, "makes a file name of 256 bytes, but at most 255 are allowed")

    def test_long_names_of_states(self):
        dcp = mount.require("torch.distributed.checkpoint")
        job = self.new_job()
        moments = {"k" * length: {"layer.weight": torch.full((2, 2), float(length))} for length in (252, 253, 255)}
        moments["exp_avg"] = {"layer.weight": torch.full((2, 2), 1.)}
        dcp.save({"model": {"layer.weight": torch.ones(2, 2)}, "optimizer": {"step": {"layer.weight": torch.tensor(3.)}, **moments}},
                 checkpoint_id=job.incoming("base"), no_dist=True)
        job.commit("base")
        self.expect_each_name(job.checkpoint("base", LAYOUT))
        self.assertEqual(set(os.listdir(job.checkpoint("base", LAYOUT, "global_step0/zero/layer.weight"))),
                         {"fp32.pt", "exp_avg.pt", "step.pt", "k" * 252 + ".pt"})
        self.assertIn("2 tensors ('optimizer.kkk", mount.read_text(job.checkpoint("base", LAYOUT, "LEFT_OUT.txt")))

    def test_long_names_of_a_universal_one(self):
        job = self.new_job()
        top = job.incoming("base") + "/global_step100_universal"
        shapes = {called(length): torch.Size((2, 2)) for length in (200, 244, 245, 250, 255)}
        save({"module": {name: torch.ones(shape) for name, shape in shapes.items()}, "param_shapes": [shapes], "mp_world_size": 1,
              "buffer_names": [], "ds_version": "0.19.0", "global_steps": 100}, top + "/mp_rank_00_model_states.pt")
        for name, shape in shapes.items():
            for number, key in enumerate(KEYS):
                save({"cat_dim": 0, "param": torch.full(shape, float(len(name) + number))}, f"{top}/zero/{name}/{key}.pt")
            save(torch.tensor(7.), f"{top}/zero/{name}/step.pt")
        save({"param_groups": [{}]}, top + "/zero/optimizer_state.pt")
        job.commit("base")
        self.expect_each_name(job.checkpoint("base"))
        zero = job.checkpoint("base", LAYOUT, "global_step100_universal/zero")
        for name in shapes:
            found = [torch.load(f"{zero}/{name}/{key}.pt", weights_only=True)["param"][0, 0].item() for key in KEYS]
            self.assertEqual([value - len(name) for value in found], [0, 1, 2])
        done = self.mount.ptc("verify", job.path)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


if __name__ == "__main__":
    mount.main()
