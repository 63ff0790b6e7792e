"""rules.json: a bad one is refused where it is saved, with place and reason; `ptc rules` explains."""
import json
import os
import subprocess

import models
import mount
from test_refusals import Saving

FORMAT = '"format": "ptc-rules/1"'
# The rest of a file with one rule, and of a rule with one cut.
RULE = '{%s, "rules": [{"names": ["a.{layer}.w"], %%s}]}' % FORMAT
CUT = RULE % '"cut": {"axis": 0, %s}'

# What is wrong → (text, reasons …); § is where the reason must point.
REFUSED = {
    "a comma too many": ('{%s,\n §}' % FORMAT, "not valid JSON"),
    "cut off": ('{%s§' % FORMAT, "ends too early"),
    "a list": ('§[]', "a rule set is a JSON object"),
    "a key twice": ('{%s,\n "tied": true, §"tied": false}' % FORMAT, "'tied' is there twice"),
    "no format": ('§{"rules": []}', "'format' must be \"ptc-rules/1\""),
    "another format": ('{"format": §"ptc-rules/2"}', "'format' must be \"ptc-rules/1\""),
    "format is no text": ('{"format": §1}', "'format' must be a text"),
    "an unknown key": ('{%s,\n §"ruless": []}' % FORMAT, "'ruless' (did you mean 'rules'?)"),
    "a key like no other": ('{%s, §"quantisation": 4}' % FORMAT, "known are format, family"),
    "an unknown family": ('{%s, "extends": §"lama"}' % FORMAT, "did you mean 'llama'?"),
    "a family of its own": ('{%s, "extends": §"custom"}' % FORMAT, "there are bailing_moe, bart"),
    "prefixes are no list": ('{%s, "prefixes": §"model."}' % FORMAT, "must be a list of texts"),
    "a prefix is no text": ('{%s, "prefixes": ["a.", §1]}' % FORMAT, "expected a text"),
    "facts are no object": ('{%s, "facts": §[]}' % FORMAT, "'facts' must be an object"),
    "a fact in words": ('{%s, "facts": {"heads": §"n_head"}}' % FORMAT, "or a list of config.json's"),
    "a fact below zero": ('{%s, "facts": {"heads": §-1}}' % FORMAT, "must be a whole number"),
    "a fact too large": ('{%s, "facts": {"heads": §4294967296}}' % FORMAT, "too large"),
    "a fact's name": ('{%s, "facts": {"Heads": §8}}' % FORMAT, "small letters, digits"),
    "tied is a number": ('{%s, "tied": §1}' % FORMAT, "'tied' must be true, false or"),
    "an unknown key of tied": ('{%s, "tied": {§"keys": "x"}}' % FORMAT, "did you mean 'key'?"),
    "tied types are no list": ('{%s, "tied": {"default_of": §"gemma"}}' % FORMAT, "must be a list of texts"),
    "needs_type is a text": (RULE % '"needs_type": §"llama"', "must be true or false"),
    "scales without block": ('{%s, "scales": §{"suffix": "_s"}}' % FORMAT, "needs 'suffix' and"),
    "scales of no size": ('{%s, "scales": {"suffix": "_s", "block": §0}}' % FORMAT, "from 1 to"),
    "quantised is an object": ('{%s, "quantised": §{}}' % FORMAT, "'quantised' must be a list"),
    "a part is a text": ('{%s, "quantised": [§"qweight"]}' % FORMAT, "a quantised weight's part must be an object"),
    "a part without a name": ('{%s, "quantised": [§{"axes": "in"}]}' % FORMAT, "needs 'names' or 'suffixes'"),
    "a part's unknown axes": ('{%s, "quantised": [{"names": ["q"], "axes": §"out"}]}' % FORMAT, '"heads" or "whole"'),
    "a part of two components": ('{%s, "quantised": [{"names": ["q", §"a.b"]}]}' % FORMAT, "a component of a name"),
    "an unknown key of a part": ('{%s, "quantised": [{§"name": ["q"]}]}' % FORMAT, "did you mean 'names'?"),
    "adapters are a list": ('{%s, "adapters": §[]}' % FORMAT, "'adapters' must be"),
    "wrappers are a list": ('{%s, "wrappers": §["module"]}' % FORMAT, "'wrappers' must be"),
    "an unknown key of wrappers": ('{%s, "wrappers": {§"lead": []}}' % FORMAT, "unknown key 'lead'; known are leading, anywhere"),
    "a wrapper of two components": ('{%s, "wrappers": {"anywhere": ["a", §"b.c"]}}' % FORMAT, "one component of a name"),
    "known_by is a text": ('{%s, "known_by": §"a.w"}' % FORMAT, "'known_by' must be a list"),
    "known_by an open brace": ('{%s, "known_by": [§"a.{layer"]}' % FORMAT, "without its '}'"),
    "rules are no list": ('{%s, "rules": §{}}' % FORMAT, "must be a list of objects"),
    "a rule is no object": ('{%s, "rules": [§"a"]}' % FORMAT, "a rule must be an object"),
    "an unknown key of a rule": (RULE % '§"cuts": {}', "'cuts' (did you mean 'cut'?)"),
    "no names": ('{%s, "rules": [§{"stage": "all"}]}' % FORMAT, "a rule needs 'names'"),
    "names without one": ('{%s, "rules": [{"names": §[]}]}' % FORMAT, "a rule needs 'names'"),
    "a name is no text": ('{%s, "rules": [{"names": [§7]}]}' % FORMAT, "must be a text"),
    "an open brace": ('{%s, "rules": [{"names": ["w.{layer}",\n  §"a.{layer"]}]}' % FORMAT,
                      "has a '{' without its '}'"),
    "a closing brace": ('{%s, "rules": [{"names": [§"a.layer}.w"]}]}' % FORMAT, "without its '{'"),
    "a layer twice": ('{%s, "rules": [{"names": [§"a.{layer}.{layer}"]}]}' % FORMAT, "twice"),
    "an unknown placeholder": ('{%s, "rules": [{"names": [§"a.{head}"]}]}' % FORMAT,
                               "neither {layer} nor {expert}"),
    "three stars": ('{%s, "rules": [{"names": [§"a.{layer}.***"]}]}' % FORMAT, "more than two '*'"),
    "no layer": ('{%s, "rules": [{"names": [§"a.w"]}]}' % FORMAT, 'say on which pipeline stage'),
    "an unknown stage": (RULE % '"stage": §"middle"', '"layer", "first", "last", "mtp" or "all"'),
    "a cut is no object": (RULE % '"cut": §"axis0"', "'cut' must be an object"),
    "an unknown kind of cut": (RULE % '"cut": {"axis": 0,\n §"experts": 4}', "unknown key 'experts'"),
    "a misspelt axis": (RULE % '"cut": {§"axsi": 0}', "'axsi' (did you mean 'axis'?)"),
    "no axis": (RULE % '"cut": §{"heads": 8}', "'cut' needs 'axis'"),
    "an axis there cannot be": (RULE % '"cut": {"axis": §8}', "a whole number from 0 to 7"),
    "an axis below zero": (RULE % '"cut": {"axis": §-1}', "a whole number from 0 to 7"),
    "an axis in words": (RULE % '"cut": {"axis": §"rows"}', "a whole number from 0 to 7"),
    "no heads": (CUT % '"heads": §0', "from 1 to"),
    "an unknown fact": (CUT % '"heads": §"heads"', "unknown fact 'heads'; name it in 'facts'"),
    "shared elements": (CUT % '"share": §true', "'share' needs 'heads'"),
    "share is a number": (CUT % '"heads": 8, "share": §1', "'share' must be true or false"),
    "heads and parts": (CUT % '"parts": [{}], "heads": §8', "exclude each other"),
    "parts are no list": (CUT % '"parts": §{}', "'parts' must be a list"),
    "a part is no object": (CUT % '"parts": [{}, §2]', "a part must be an object"),
    "a part's unknown key": (CUT % '"parts": [{§"sizes": 2}]', "did you mean 'size'?"),
    "a part when it rains": (CUT % '"parts": [{"when": §"rain"}]', "'when' must be an object of facts"),
    "a part's unknown fact": (CUT % '"parts": [{"when": {"rain": §1}}]', "unknown fact 'rain'; name it in 'facts'"),
    "a part's fact in words": ('{%s, "facts": {"rain": 1}, "rules": [{"names": ["{layer}.w"], "cut": {"axis": 0,\n'
                               '"parts": [{"when": {"rain": §"much"}}]}}]}' % FORMAT, "must be a whole number from 0 to"),
    "padding of one rank": (CUT % '"pad_single_rank": §true', "needs 'vocab_multiple'"),
    "a vocabulary of heads": (CUT % '"heads": 2, "vocab_multiple": §8', "has neither 'heads' nor"),
    "blocks of nothing": (CUT % '"block": §0', "from 1 to"),
    "experts on the cut axis": (RULE % '"cut": {"axis": 0}, "expert_axis": §0', "must differ"),
    "tied_when alone": (RULE % '"tied_when": §"b"', "needs 'tied_head'"),
    "a buffer of words": (RULE % '"buffer": §"yes"', "'buffer' must be true or false"),
}


def marked(text):
    """The text without its §, and the place of it in words."""
    before, _, after = text.partition("§")
    lines = before.split("\n")
    return before + after, f"line {len(lines)}, column {len(lines[-1]) + 1}"


class Rules(Saving):
    GOOD = '{%s, "extends": "llama", "facts": {"kv_heads": 2}}\n' % FORMAT

    def begin(self, job):
        self.job, self.path = job, job.file("rules.json")
        models.write_file(self.path, self.GOOD)
        self.before, self.text = job.status(), mount.read_text(self.path)

    def test_every_refusal(self):
        self.begin(self.new_job())
        for what, (text, *reasons) in REFUSED.items():
            with self.subTest(what):
                text, place = marked(text)
                self.check_refused(text, place, *reasons)
        self.assertEqual(self.save(self.GOOD + " "), "")
        self.assertIsNone(self.job.status()["last_error"])
        self.assertEqual(mount.read_text(self.path), self.GOOD + " ")


class Explained(mount.TestCase):
    def job_of(self, model):
        return self.job_of_name(model, self.id().rsplit(".", 1)[-1])

    def job_of_name(self, model, name):
        job = self.mount.job(name)
        model.write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        return job

    def check(self, *arguments, code=0):
        done = self.mount.ptc("rules", "check", *arguments, check=False, env={"COLUMNS": "80"})
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        if "--json" not in arguments:
            self.assertTrue(all(len(line) <= 80 for line in done.stdout.splitlines()), done.stdout)
        return done

    def test_families(self):
        text = self.mount.ptc("rules", "list").stdout
        listed = json.loads(self.mount.ptc("rules", "list", "--json").stdout)
        self.assertTrue(all(len(line) <= 80 for line in text.splitlines()), text)
        for family in listed:
            self.assertIn(family["family"], text)
            shown = json.loads(self.mount.ptc("rules", "show", family["family"]).stdout)
            self.assertEqual(shown["family"], family["family"])
            self.assertEqual(len(shown["rules"]) <= family["rules"], True)
        self.assertIn("llama", [family["family"] for family in listed])
        unknown = self.mount.ptc("rules", "show", "lama", check=False)
        self.assertEqual(unknown.returncode, 1)
        self.assertIn("did you mean 'llama'?", unknown.stderr)
        self.assertEqual(self.mount.ptc("rules", check=False).returncode, 2)
        self.assertEqual(self.mount.ptc("rules", "check", check=False).returncode, 2)

    def test_how_a_model_is_cut(self):
        model = models.Llama()
        job = self.job_of(model)
        text = self.check(job.name, "--layout", "tp4-pp2-dp1").stdout
        self.assertIn("under tp4-pp2-dp1, with the rules of family llama", text)
        self.assertIn("kv_heads 2", text)
        self.assertRegex(text, r"model\.layers\.\{0-4\}\.self_attn\.q_proj\.weight +"
                               r"\[64, 64\] (→|->) \[16, 64\]")
        self.assertRegex(text, r"model\.embed_tokens\.weight +\[515, 64\] (→|->) \[256, 64\]")
        report = json.loads(self.check(job.name, "--layout", "tp4-pp2-dp1", "--json").stdout)
        self.assertEqual(sum(entry["count"] for entry in report["tensors"]), len(model.tensors))
        shapes = {t.name: list(t.shape) for t in model.rank_tensors(4, 2, 1, 0)}
        for entry in report["tensors"]:
            name = entry["names"].replace("{0-4}", "0")
            if name in shapes:
                self.assertEqual(entry["ranks"][0]["shape"], shapes[name], name)

    def test_the_layout_is_the_jobs_else_a_file(self):
        job = self.job_of(models.Gpt2())
        job.set_layout(tp=2)
        text = self.check(job.name + "/base", "c_attn").stdout
        self.assertIn("under tp2-pp1-dp1", text)
        self.assertIn("by 4 heads + 4 heads + 4 heads", text)
        self.assertNotIn("wte", text)
        path = self.temporary("layout.json")
        models.write_file(path, '{"tp": 1, "pp": 1, "dp": 5, "optimizer": "fsdp"}')
        text = self.check(job.name, "h.0.mlp.c_fc.bias", "wpe", "--layout", path).stdout
        self.assertIn("[7, 48] on dp 0-3", text)
        self.assertIn("[5, 48] on dp 4", text)

    def test_what_does_not_fit(self):
        job = self.job_of(models.Bert())
        done = self.check(job.name, "--layout", "tp3-pp1-dp1", code=1)
        self.assertIn("tp3-pp1-dp1 does not fit: ", done.stderr)
        self.assertIn("4 heads", done.stdout)
        none = self.check(job.name, "q_proj", code=1)
        self.assertIn("no tensor has 'q_proj' in its name", none.stderr)
        models.write_safetensors(job.incoming("odd") + "/rank/0/model.safetensors",
                                 [models.Tensor("odd.thing", "F32", (4,), bytes(16))])
        job.commit("odd")
        self.assertIn("cannot be cut", self.check(job.name + "/odd").stdout)

    def test_a_file_offline(self):
        path = self.temporary("rules.json")
        models.write_file(path, Rules.GOOD)
        self.assertIn("good: family llama", self.check(path).stdout)
        for text, *reasons in REFUSED.values():
            text, place = marked(text)
            models.write_file(path, text)
            error = self.check(path, code=1).stderr
            self.assertIn(f"{path}: {place}: ", error)
            for reason in reasons:
                self.assertIn(reason, error)
        self.assertIn("No such file", self.check(path + ".json", code=1).stderr)

    def test_a_model_offline(self):
        model, directory = models.Llama(), self.temporary("model")
        model.write_hf(directory)
        job = self.job_of(model)
        report = json.loads(self.check(directory, "--layout", "tp4-pp2-dp1", "--json").stdout)
        of_job = json.loads(self.check(job.name, "--layout", "tp4-pp2-dp1", "--json").stdout)
        self.assertEqual(report.pop("fits"), of_job.pop("fits"))
        self.assertEqual(report, of_job)
        self.assertIn(f"{directory} under tp2-pp1-dp1, with the rules of family llama",
                      " ".join(self.check(directory).stdout.split()))
        self.assertIn("8 heads", self.check(directory, "--layout", "tp3-pp1-dp1", code=1).stdout)
        rules = self.temporary("rules.json")
        models.write_file(rules, '{%s, "extends": "llama", "family": "mine", "facts": {"heads": 6}}' % FORMAT)
        done = self.check(directory, "--rules", rules, "--layout", "tp3-pp1-dp1", code=1)
        self.assertIn("family mine", " ".join(done.stdout.split()))
        self.assertIn("No such file", self.check(directory, "--rules", rules + "x", code=1).stderr)
        model.write_hf(directory + "-shards", sharded=True)
        self.assertIn("layers.{0-4}.mlp", self.check(directory + "-shards").stdout)  # of one file, as a mount has them
        models.write_file(directory + "/model-9.safetensors", "torn")
        self.assertIn("model-9.safetensors: ", self.check(directory, code=1).stderr)

    def suggested(self, *arguments):
        done = self.mount.ptc("rules", "suggest", *arguments)
        return json.loads(done.stdout), done.stderr

    def test_rules_to_begin_with(self):
        model, directory, path = models.Llama(), self.temporary("model"), self.temporary("rules.json")
        model.config = {**model.config, "model_type": "brand_new"}
        layer = "model.layers.0."
        for name, shape in ((layer + "self_attn.qkv_proj.weight", (96, 64)), (layer + "extra.fc_in.weight", (8, 4)),
                            (layer + "extra.fc_in.bias", (8,)), (layer + "extra.fc_out.weight", (4, 8)),
                            (layer + "extra.fc_out.bias", (4,)), ("model.vision.table", (3, 4)), ("extra.scale", (5,))):
            size = 4
            for extent in shape:
                size *= extent
            model.tensors.append(models.Tensor(name, "F32", shape, bytes(size)))
        model.write_hf(directory)
        self.check(directory, code=1)
        rules, said = self.suggested(directory)
        self.assertEqual(rules["extends"], "llama")
        self.assertIn("guess: the order inside of model.layers.{layer}.self_attn.qkv_proj.weight", rules["description"])
        found = {name: (rule.get("cut", {}).get("axis"), rule.get("stage")) for rule in rules["rules"]
                 for name in rule["names"] if rule["description"].startswith("guess: ")}
        layers = "model.layers.{layer}.extra."
        self.assertEqual(found, {layers + "fc_in.weight": (0, None), layers + "fc_in.bias": (0, None),
                                 layers + "fc_out.weight": (1, None), layers + "fc_out.bias": (None, None),
                                 "model.vision.table": (None, "first"), "extra.scale": (None, "all")})
        self.assertIn("6 of this are guessed", said)
        models.write_file(path, json.dumps(rules))
        self.check(path)
        self.check(directory, "--rules", path, "--layout", "tp2-pp2-dp1")
        job = self.new_job()
        models.write_file(job.file("rules.json"), json.dumps(rules))
        model.write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        job.set_layout(tp=2, pp=2)
        known, said = self.suggested(self.job_of_name(models.Gpt2(), "known").name)
        self.assertEqual((known["extends"], known["rules"]), ("gpt2", []))
        self.assertIn("all names", said)

    def python_that_says(self, text):
        """A program that answers so to whoever asks it for a plan."""
        path = self.temporary("python")
        models.write_file(path, "#!/bin/sh\ncat <<'END'\n" + text + "\nEND\n")
        os.chmod(path, 0o755)
        return path

    def test_guesses_by_plan_and_config(self):
        model, directory = models.Llama(), self.temporary("planned")
        model.config = {**model.config, "model_type": "brand_new"}
        hidden, inner = model.config["hidden_size"], model.config["intermediate_size"]
        for name, shape in (("a.weight", (hidden, inner)), ("b.weight", (8, hidden)), ("c.weight", (8, hidden))):
            model.tensors.append(models.Tensor("model.layers.0.extra." + name, "F32", shape, bytes(4 * shape[0] * shape[1])))
        model.write_hf(directory)
        plan = self.python_that_says('{"plan": {"layers.*.extra.b": "colwise"}}')
        rules, said = self.suggested(directory, "--python", plan)
        self.assertNotIn("transformers", said)
        layers = "model.layers.{layer}.extra."
        self.assertEqual({rule["names"][0]: (rule.get("cut"), rule["description"]) for rule in rules["rules"]}, {
            layers + "a.weight": ({"axis": 1}, "guess: it has as many columns as the inner width"),
            layers + "b.weight": ({"axis": 0}, "guess: transformers' plan says colwise"),
            layers + "c.weight": (None, "guess: whole on each rank")})
        job = self.new_job()
        model.write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        self.assertEqual(self.suggested(job.name, "--python", plan)[0], rules)
        for text, why in (('{"error": "it has none"}', "python: it has none"), ("{", "is no Python 3, or failed"),
                          ('{"plan": []}', "did not say a plan"), ("", "is no Python 3, or failed")):
            bad = self.mount.ptc("rules", "suggest", directory, "--python", self.python_that_says(text), check=False)
            self.assertEqual((bad.returncode, bad.stdout), (1, ""))
            self.assertIn(why, bad.stderr)
        bad = self.mount.ptc("rules", "suggest", directory, "--python", plan + "-none", check=False)
        self.assertIn("No such file", bad.stderr)
        # What is asked may well be of a type that nobody knows: guesses are for that.
        unknown, said = self.suggested(directory, "--python", self.python_that_says('{"plan": null}'))
        self.assertIn("do not know this type", said)
        self.assertIn("guess: whole on each rank", [rule["description"] for rule in unknown["rules"]])
        # Whatever python3 is: guessed without, where it has no transformers.
        self.assertEqual(self.suggested(directory)[0]["extends"], "llama")

    def test_no_module_of_the_current_directory_is_run(self):
        """It may be anybody's; also where the path of modules has an empty entry."""
        model, directory, there = models.Llama(), self.temporary("model-here"), self.temporary("there")
        model.write_hf(directory)
        for module in ("transformers/__init__.py", "sitecustomize.py"):
            models.write_file(f"{there}/{module}", f"open({there + '/was-run'!r}, 'w')")
        for path in ("", ":", ":/opt/none"):
            subprocess.run([os.path.join(mount.bin_dir(), "ptc"), "rules", "suggest", directory + "/."], cwd=there, check=True,
                           env={**os.environ, "PYTHONPATH": path}, capture_output=True, timeout=120)
        self.assertEqual(sorted(os.listdir(there)), ["sitecustomize.py", "transformers"])

    def test_what_only_is_named_as_a_file_is_not_waited_for(self):
        directory = self.temporary("model-pipe")
        os.mkdir(directory)
        os.mkfifo(directory + "/model.safetensors")
        done = self.mount.ptc("rules", "check", directory + "/.", check=False)
        self.assertIn("model.safetensors: it is not a regular file", done.stderr)

    def test_what_a_refusal_says_can_be_done(self):
        model = models.Llama()
        model.tensors.append(models.Tensor("model.layers.0.odd.up_proj.weight", "F32", (8, 4), bytes(128)))
        model.tensors.append(models.Tensor("model.layers.0.odd.down_proj.weight", "F32", (4, 8), bytes(128)))
        job = self.job_of(model)
        self.assertEqual(mount.error_of(lambda: job.save_layout(tp=2)), "EINVAL")
        said = job.error()
        self.assertIn('then the layout with "rules": "rules.json" (ptc layout JOB set --rules rules.json)', said)
        guess = json.loads(said[said.index("a guess: ") + len("a guess: "):])
        self.assertEqual(sorted(rule["cut"]["axis"] for rule in guess["rules"]), [0, 1])
        models.write_file(job.file("rules.json"), json.dumps(guess))
        self.assertEqual(mount.error_of(lambda: job.save_layout(tp=2)), "EINVAL")  # that alone changes nothing
        self.mount.ptc("layout", job.name, "set", "--tp", "2", "--rules", "rules.json")
        job.wait()
        self.assertTrue(job.status()["layout"].startswith("tp2-pp1-dp1-rules_"))

    def test_rules_that_hold_for_nothing_are_named(self):
        job = self.mount.job("dead")
        rules = [{"names": ["layers.{layer}.self_attn.qq_proj.weight"]}, {"names": ["layers.{layer}.mlp.up_proj.weight"]},
                 {"names": ["layers.{layer}.mlp.up_*.weight"], "cut": {"axis": 0}}]
        models.write_file(job.file("rules.json"), json.dumps({"format": "ptc-rules/1", "extends": "llama", "rules": rules}))
        models.Llama().write_hf(job.incoming("base") + "/rank/0")
        job.commit("base")
        text = " ".join(self.check("dead").stdout.split())
        self.assertIn("rule layers.{layer}.self_attn.qq_proj.weight: no tensor has such a name", text)
        self.assertIn("rule layers.{layer}.mlp.up_*.weight: a rule before it holds for model.layers.0.mlp.up_proj.weight", text)

    def test_a_config_json_that_the_tensors_contradict(self):
        model = models.Llama()
        model.config = {**model.config, "num_hidden_layers": 8}
        job = self.job_of(model)
        said = "config.json says 8 layers, and there are tensors of 5"
        self.assertIn(said, " ".join(self.check(job.name).stdout.split()))
        job.set_layout(tp=2)
        self.assertEqual(mount.error_of(lambda: job.save_layout(tp=2, pp=2)), "EINVAL")
        self.assertIn(said + ": pp = 2", job.error())
        self.assertIn("line 1, column 43: ", job.error())  # of pp
        models.write_file(job.file("rules.json"), '{%s, "extends": "llama", "facts": {"layers": 5}}' % FORMAT)
        layouts = job.checkpoint("base", "layouts")
        # By its name it is none either: it would have stages of layers that are not there.
        self.assertTrue(os.path.isdir(f"{layouts}/tp2-pp1-dp1"))
        self.assertFalse(os.path.exists(f"{layouts}/tp1-pp2-dp1"))
        self.assertIn("8 layers", mount.read_text(f"{layouts}/vllm-tp1-pp2/serve/LEFT_OUT.txt"))
        job.set_layout(pp=2, rules="rules.json")
        self.assertEqual(len(os.listdir(f"{layouts}/{job.status()['layout']}/rank")), 2)

    def test_a_layout_that_a_config_json_contradicts_is_edited_on(self):
        model = models.Llama()
        model.config = {**model.config, "num_hidden_layers": 6}
        job = self.mount.job("contradicted")
        job.set_layout(pp=2)
        model.write_ranks(job.incoming("base"), 1, 2)
        job.commit("base")
        job.wait()
        said = "config.json says 6 layers, and there are tensors of 5"
        self.assertEqual(job.status()["layout"], "tp1-pp2-dp1")
        self.assertEqual(job.status()["warnings"], ["checkpoint base: " + said])
        self.assertIn(said, " ".join(self.mount.ptc("status", job.name).stdout.split()))
        node = job.status()["nodes"][0]["name"]
        for fields in ({"pp": 2, "keep": 3}, {"pp": 2, "devices": [node + ":1", node + ":0"]}, {"pp": 2, "dp": 2}, {"pp": 2, "tp": 2}):
            job.set_layout(**fields)
        for fields in ({"pp": 3}, {"pp": 2, "stages": [3, 3]}):
            self.assertEqual(mount.error_of(lambda fields=fields: job.save_layout(**fields)), "EINVAL")
            self.assertIn(said, job.error())
        job.set_layout(tp=2)
        self.assertEqual(mount.error_of(lambda: job.save_layout(pp=2)), "EINVAL")
        # As it was written it is read all the same.
        self.assertEqual(os.listdir(job.checkpoint("base", "layouts", "tp1-pp2-dp1", "rank")), ["0", "1"])
        self.assertFalse(os.path.exists(job.checkpoint("base", "layouts", "tp1-pp3-dp1")))

    def test_a_type_that_is_not_known_is_cut_by_names_that_are(self):
        model = models.Llama()
        model.config = {**model.config, "model_type": "brand_new"}
        job = self.job_of(model)
        self.assertIn("rules of family llama", self.check(job.name, "--layout", "tp2-pp1-dp1").stdout)
        job.set_layout(tp=2)
        model.tensors.append(models.Tensor("model.layers.0.sideways.weight", "F32", (4,), bytes(16)))
        job.set_layout(tp=1)
        model.write_hf(job.incoming("more") + "/rank/0")
        job.commit("more")
        self.assertIn("sideways", self.check(job.name + "/more", "--layout", "tp2-pp1-dp1", code=1).stderr)


if __name__ == "__main__":
    mount.main()
