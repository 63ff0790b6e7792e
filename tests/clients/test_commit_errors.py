"""A checkpoint that is wrong is not committed, loses nothing, and is told why."""
import json
import os
import shutil
import struct
import subprocess

import models
import mount

MODEL = models.Gpt2()
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "rank/0/model.safetensors.index.json"


# ---- good checkpoints, and what spoils them -------------------------------------------------------
# Each of the latter takes the directory incoming/<name>.

def hf(at):
    MODEL.write_hf(at + "/rank/0")


def sharded(at):
    MODEL.write_hf(at + "/rank/0", sharded=True)


def two_by_two(at):
    MODEL.write_ranks(at, 2, 2)


def staged(at):
    """Names local to a stage; three layers on two stages."""
    models.write_file(at + "/layout.json", '{"tp": 1, "pp": 2, "dp": 1, "naming": "stage"}')
    MODEL.write_ranks(at, 1, 2)
    edit(at, "rank/1/model.safetensors", lambda tensors: [
        models.Tensor(t.name.replace("h.2.", "h.0."), t.dtype, t.shape, t.data) for t in tensors])


def edit(at, path, change):
    """Rewrites a safetensors file: `change` maps its list of tensors."""
    path = os.path.join(at, path)
    models.write_safetensors(path, change(list(models.read_safetensors(path).values())))


def with_file(path, content):
    return lambda at: models.write_file(os.path.join(at, path), content)


def without(path):
    return lambda at: (shutil.rmtree if os.path.isdir(os.path.join(at, path)) else os.unlink)(
        os.path.join(at, path))


def with_header(header, data=bytes(16)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return with_file("rank/0/model.safetensors", struct.pack("<Q", len(text)) + text + data)


def cut_to(path, size):
    return lambda at: os.truncate(os.path.join(at, path), size)


def cut_by_one(path):
    return lambda at: os.truncate(os.path.join(at, path),
                                  os.path.getsize(os.path.join(at, path)) - 1)


def without_tensor(path, name):
    return lambda at: edit(at, path, lambda ts: [t for t in ts if t.name != name])


def with_tensor(path, tensor):
    return lambda at: edit(at, path, lambda ts: [t for t in ts if t.name != tensor.name] + [tensor])


def zeros(name, dtype, *shape):
    return models.Tensor(name, dtype, shape,
                         bytes(models.count(shape) * models.ITEM_BYTES[dtype]))


def with_index(change):
    def spoil(at):
        path = os.path.join(at, INDEX)
        index = json.loads(mount.read_text(path))
        change(index["weight_map"])
        os.unlink(path)
        models.write_file(path, json.dumps(index))
    return spoil


def swap_two(weight_map):
    weight_map["wte.weight"] = SHARDS[1]


def ranks_moved_up(at):
    os.rename(at + "/rank/0/model.safetensors", at + "/model-0.safetensors")
    shutil.copy(at + "/model-0.safetensors", at + "/model-1.safetensors")
    shutil.rmtree(at + "/rank")


def ranks_below(at):
    """They differ, and are in folders of their own."""
    os.mkdir(at + "/step1")
    os.rename(at + "/rank", at + "/step1/rank")
    shutil.copy(at + "/step1/rank/0/model.safetensors", at)


def link(at):
    os.symlink("config.json", at + "/rank/0/link")


def pipe(at):
    os.mkfifo(at + "/rank/0/pipe")


def npy_instead(content):
    def spoil(at):
        os.unlink(at + "/rank/0/model.safetensors")
        models.write_file(at + "/rank/0/wte/weight.npy", content)
    return spoil


def torch_file_alone(at):
    os.unlink(at + "/rank/0/model.safetensors")
    models.write_file(at + "/rank/0/pytorch_model.bin", b"PK\x03\x04" + bytes(64))


def instead_of_torch_files(name, content):
    def spoil(at):
        os.unlink(at + "/rank/0/model.safetensors")
        models.write_file(at + "/rank/0/" + name, content)
    return spoil


LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
WEIGHT = "h.0.mlp.c_fc.weight"
WHOLE = next(t for t in MODEL.tensors if t.name == WEIGHT)

# What is wrong → (a good checkpoint, what spoils it, reasons …)
REFUSED = {
    # directories and ranks
    "nothing in it": (hf, without("rank"), "no rank/ directory"),
    "ranks' files not under rank/": (hf, ranks_moved_up, "model-0.safetensors and model-1.safetensors may be of several ranks", "rank/1/"),
    "a file beside rank/": (hf, with_file("notes.txt", "x"), "'notes.txt' is not under rank/<r>/"),
    "rank/ is empty": (hf, without("rank/0"), "rank/ holds no files"),
    "not a rank's number": (hf, with_file("rank/first/x", "x"), "rank/first is not a rank's number"),
    "a rank with a zero before it": (hf, with_file("rank/00/x", "x"), "rank/00 is not a rank's"),
    "a rank too many": (hf, with_file("rank/1/x", "x"), "rank/1 does not exist in layout tp1-pp1-dp1"),
    "a rank is missing": (two_by_two, without("rank/3"), "rank 3 (tp rank 1, pp rank 1",
                          "tp2-pp2-dp1", "wrote nothing"),
    "a rank without tensors": (two_by_two, without("rank/2/model.safetensors"), "rank 2"),
    "ranks below a single process' files": (
        two_by_two, ranks_below, "step1/rank/0/model.safetensors is of a rank", "commit step1/rank/ as one of its own"),
    "a symbolic link": (hf, link, "rank/0/link is a symbolic link"),
    "a pipe": (hf, pipe, "rank/0/pipe is no ordinary file"),
    # tensors and the layout
    "a tensor is missing on one rank": (
        two_by_two, without_tensor("rank/1/model.safetensors", WEIGHT), "rank 1", "lacks " + WEIGHT),
    "a tensor that is not cut": (
        two_by_two, with_tensor("rank/1/model.safetensors", WHOLE), "rank 1", WEIGHT, "has shape"),
    "another type on one rank": (
        two_by_two, with_tensor("rank/1/model.safetensors",
                                zeros(WEIGHT, "F32", *WHOLE.shape[:1], WHOLE.shape[1] // 2)),
        "rank 1", WEIGHT, "F32", "F16"),
    "a tensor on the wrong stage": (
        two_by_two, with_tensor("rank/0/model.safetensors", zeros("ln_f.bias", "F16", 48)),
        "rank 0", "ln_f.bias", "does not belong on"),
    "replicas that differ": (
        two_by_two, with_tensor("rank/1/model.safetensors", zeros("h.0.ln_1.weight", "F16", 48)),
        "rank/0/model.safetensors and rank/1/model.safetensors both hold", "h.0.ln_1.weight"),
    "no tensor at all": (hf, without("rank/0/model.safetensors"), "there is no tensor in it"),
    "stages with other layers": (
        staged, with_file("layout.json", '{"tp": 1, "pp": 2, "dp": 1, "naming": "stage", '
                                         '"stages": [1, 2]}'), "pipeline stage 0 wrote 2 layers"),
    "the writer's layout is wrong": (hf, with_file("layout.json", '{"tpp": 2}'),
                                     "layout.json: line 1, column 2", "'tpp'"),
    "the writer's layout is another": (
        hf, with_file("layout.json", '{"tp": 2, "pp": 1, "dp": 1}'), "rank 1"),
    "a comma too many in config.json": (hf, with_file("rank/0/config.json", '{"n_head": 4,\n}'),
                                        "config.json", "line 2, column 1", "the comma before this '}' is one too many"),
    "a config that is not JSON": (hf, with_file("rank/0/config.json", "{"), "config.json", "line 1"),
    # safetensors
    "an empty file": (hf, cut_to("rank/0/model.safetensors", 0), "rank/0/model.safetensors"),
    "a truncated length": (hf, cut_to("rank/0/model.safetensors", 5), "rank/0/model.safetensors"),
    "a truncated header": (hf, cut_to("rank/0/model.safetensors", 100), "rank/0/model.safetensors"),
    "truncated data": (hf, cut_by_one("rank/0/model.safetensors"), "rank/0/model.safetensors"),
    "a header of 2^63 bytes": (
        hf, with_file("rank/0/model.safetensors", struct.pack("<Q", 2**63) + b"{}"), "model.safetensors"),
    "an unknown type": (
        hf, with_header({"w": {"dtype": "F128", "shape": [1], "data_offsets": [0, 16]}}),
        "F128", "'w'"),
    "a header that is not JSON": (hf, with_header(b"{"), "model.safetensors"),
    "a header that is a list": (hf, with_header(b"[]"), "model.safetensors"),
    "a header that is not UTF-8": (hf, with_header(b"\xff\xfe{}"), "model.safetensors"),
    "offsets for another shape": (
        hf, with_header({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}}), "'w'"),
    "offsets backwards": (
        hf, with_header({"w": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}), "w"),
    "a negative length": (
        hf, with_header({"w": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}), "w"),
    "a shape beyond 64 bits": (
        hf, with_header({"w": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 16]}}),
        "w"),
    "a hole before the data": (
        hf, with_header({"w": {"dtype": "U8", "shape": [8], "data_offsets": [8, 16]}}),
        "model.safetensors"),
    "two tensors in one place": (
        hf, with_header({"w": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]},
                         "v": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]}}),
        "model.safetensors"),
    "a tensor twice": (
        hf, with_header(b'{"w": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},'
                        b' "w": {"dtype": "U8", "shape": [8], "data_offsets": [8, 16]}}'),
        "model.safetensors", "w"),
    "no name": (hf, with_header({"": {"dtype": "U8", "shape": [16], "data_offsets": [0, 16]}}),
                "empty name"),
    "a git-lfs pointer": (
        hf, with_file("rank/0/model.safetensors", LFS_POINTER),
        "rank/0/model.safetensors: it is a git-lfs pointer", "git lfs pull"),
    "a web page": (hf, with_file("rank/0/model.safetensors", "\n<!DOCTYPE html><html>Not found</html>"),
                   "rank/0/model.safetensors: it is an HTML page"),
    "a git-lfs pointer as torch's": (
        hf, instead_of_torch_files("pytorch_model-00002-of-00002.bin", LFS_POINTER),
        "rank/0/pytorch_model-00002-of-00002.bin: it is a git-lfs pointer", "git lfs pull"),
    "a web page as torch's": (hf, instead_of_torch_files("model.pt", "<html>Not found</html>"), "rank/0/model.pt: it is an HTML page"),
    "a file of torch.save by another name": (
        hf, with_file("rank/0/model.safetensors", b"PK\x03\x04" + bytes(64)), "it is a zip archive, as torch.save writes it"),
    "a file of torch.save that was cut short": (hf, torch_file_alone, "rank/0/pytorch_model.bin: no end of a zip directory is found",
                                                "cut short"),
    # .npy
    "no .npy file": (hf, npy_instead(b"PK\x03\x04"), "wte/weight.npy"),
    "a truncated .npy": (hf, npy_instead(models.npy_bytes(zeros("w", "F32", 4))[:-1]),
                         "wte/weight.npy"),
    "a pickle in a .npy": (
        hf, npy_instead(models.npy_bytes(zeros("w", "F32", 4)).replace(b"'<f4'", b"'|O' ")),
        "wte/weight.npy"),
    # sharded sets
    "an index that is not JSON": (sharded, with_file(INDEX, "{"), INDEX, "line 1"),
    "a comma too many in an index": (
        sharded, with_file(INDEX, '{"weight_map": {"a": "' + SHARDS[0] + '",}}'), INDEX, "line 1", "the comma before this '}'"),
    "an index that is a web page": (sharded, with_file(INDEX, "<html>"), INDEX, "it is an HTML page"),
    "an index without its map": (sharded, with_file(INDEX, "{}"), INDEX, "no 'weight_map'"),
    "a shard is missing": (sharded, without("rank/0/" + SHARDS[1]),
                           INDEX + " names the shard " + SHARDS[1] + ", which is missing"),
    "a shard that leads out": (
        sharded, with_index(lambda m: m.update({"wte.weight": "../" + SHARDS[0]})),
        INDEX, "'wte.weight'", "../" + SHARDS[0], "not the name of a file beside the index"),
    "a shard from the root": (
        sharded, with_index(lambda m: m.update({"wte.weight": "/etc/passwd"})),
        "not the name of a file beside the index"),
    "a shard in two spellings": (
        sharded, with_index(lambda m: m.update({"wte.weight": "./" + SHARDS[0]})),
        "not the name of a file beside the index"),
    "a shard that is a number": (
        sharded, with_index(lambda m: m.update({"wte.weight": 1})), "'wte.weight'"),
    "a tensor that no shard has": (
        sharded, with_index(lambda m: m.update({"wte.bias": SHARDS[0]})),
        INDEX + " says that tensor 'wte.bias' is in rank/0/" + SHARDS[0] + ", but no shard has it"),
    "a tensor in another shard": (
        sharded, with_index(swap_two), "'wte.weight' is in rank/0/" + SHARDS[1],
        "but it is in rank/0/" + SHARDS[0]),
    "a tensor in two shards": (
        sharded, with_tensor("rank/0/" + SHARDS[1], zeros("wte.weight", "F16", 257, 48)),
        "tensor 'wte.weight' is there twice, in rank/0/" + SHARDS[0] + " and in rank/0/" + SHARDS[1]),
    "half of a model, without its index": (
        sharded, lambda at: [os.remove(os.path.join(at, name)) for name in (INDEX, "rank/0/" + SHARDS[1])],
        "rank/0/" + SHARDS[0] + " is one of 2 shards by its name, and " + SHARDS[1] + " is missing"),
    "a shard of two sets": (
        sharded, lambda at: shutil.copy(os.path.join(at, INDEX),
                                        at + "/rank/0/other.safetensors.index.json"),
        "is a shard of two sets"),
}


def read_bytes(path):
    with open(path, "rb") as file:
        return file.read()


def tree_of(path):
    """Every file below, with its bytes."""
    found = {}
    for where, _, names in os.walk(path):
        for name in names:
            file = os.path.join(where, name)
            plain = os.path.isfile(file) and not os.path.islink(file)
            found[os.path.relpath(file, path)] = read_bytes(file) if plain else None
    return found


class CommitErrors(mount.TestCase):
    def check_refused(self, job, name, *reasons):
        before = tree_of(job.incoming(name))
        self.assertEqual(mount.error_of(job.commit, name), "ECANCELED")
        text = job.commit_error(name)
        for reason in reasons:
            self.assertIn(reason, text)
        self.assertEqual(text.count("\n"), 1, "one paragraph")
        self.assertEqual(job.error(), f"commit of incoming/{name} refused: " + text.strip())
        told = self.mount.ptc("status", job.name).stdout
        self.assertIn("".join(text.split()), "".join(told.split()))
        self.assertEqual(tree_of(job.incoming(name)), before, "nothing is lost")
        self.assertEqual(os.listdir(job.file("checkpoints")), [])

    def check_refused_at(self, job, error, reason):
        self.assertEqual(mount.error_of(job.commit, "base"), error)
        self.assertIn(reason, job.commit_error("base"))
        self.assertIn(reason, job.error())
        self.assertTrue(os.path.exists(job.incoming("base")))

    def check_accepted(self, job, name):
        job.commit(name)
        self.assertEqual(os.listdir(job.file("checkpoints")), [name])
        self.assertEqual(os.listdir(job.file("incoming")), [])
        self.assertIsNone(job.status()["last_error"])

    def test_every_refusal(self):
        for number, (what, (write, spoil, *reasons)) in enumerate(REFUSED.items()):
            with self.subTest(what):
                job = self.mount.job(f"refused-{number}")
                if write is two_by_two:
                    job.set_layout(tp=2, pp=2)
                write(job.incoming("base"))
                spoil(job.incoming("base"))
                self.check_refused(job, "base", *reasons)
                shutil.rmtree(job.incoming("base"))
                write(job.incoming("base"))
                self.check_accepted(job, "base")

    def test_a_tensor_that_the_index_lacks_is_kept(self):
        job = self.new_job()
        sharded(job.incoming("base"))
        with_index(lambda m: m.pop("wte.weight"))(job.incoming("base"))
        self.check_accepted(job, "base")
        found = models.read_safetensors(job.rank_file("base", "tp1-pp1-dp1", 0))
        self.assertEqual(found, {t.name: t for t in MODEL.tensors})

    def test_a_file_instead_of_a_directory(self):
        job = self.new_job()
        models.write_file(job.incoming("base"), "x")
        self.check_refused_at(job, "ECANCELED", "is no directory")

    def test_names_that_no_checkpoint_has(self):
        job = self.new_job()
        hf(job.incoming(".hidden"))
        self.assertEqual(mount.error_of(job.commit, ".hidden"), "ECANCELED")
        self.assertIn("'.hidden' is no name for a checkpoint", job.error())
        self.assertTrue(os.path.exists(job.incoming(".hidden") + "/rank/0/config.json"))
        self.assertEqual(mount.error_of(os.rename, job.incoming(".hidden"),
                                        job.checkpoint("n" * 256)), "ENAMETOOLONG")

    def test_an_existing_name(self):
        job = self.new_job()
        for seed in (1, 2):
            models.Gpt2(seed).write_hf(job.incoming("base") + "/rank/0")
            if seed == 1:
                job.commit("base")
        self.check_refused_at(job, "EEXIST", "checkpoint base exists already")
        found = models.read_safetensors(job.rank_file("base", "tp1-pp1-dp1", 0))
        self.assertEqual(found, {t.name: t for t in models.Gpt2(1).tensors})
        os.rename(job.incoming("base"), job.checkpoint("second"))
        found = models.read_safetensors(job.rank_file("second", "tp1-pp1-dp1", 0))
        self.assertEqual(found, {t.name: t for t in models.Gpt2(2).tensors})

    def test_a_file_still_open_for_writing(self):
        job = self.new_job()
        hf(job.incoming("base"))
        with open(job.incoming("base") + "/rank/0/late.bin", "wb") as file:
            file.write(b"begun")
            file.flush()
            self.check_refused_at(job, "EBUSY", "late.bin is still open for writing")
            file.write(b" and ended")
        self.check_accepted(job, "base")
        self.assertEqual(mount.read_text(job.file("current/rank/0/late.bin")), "begun and ended")


    def test_what_mv_says(self):
        job = self.new_job()
        hf(job.incoming("base"))
        with_file("rank/0/config.json", "{")(job.incoming("base"))
        models.write_file(job.file("new"), "{")
        for source, target in (("incoming/base", "checkpoints/"), ("new", "layout.json")):
            done = subprocess.run(["mv", source, target], cwd=job.path, capture_output=True, text=True, check=False,
                                  env={**os.environ, "LC_ALL": "C"})
            self.assertEqual(done.returncode, 1)
            self.assertRegex(done.stderr, f"^mv: cannot move '{source}' to '{target}(base)?': Operation canceled\n$")


class Holes(mount.TestCase):
    """A mapping of a tmpfs takes a page for each hole that is read: the commit has to take them before."""
    mount_options = ("--memory", "24M")
    only_root = "can mount a tmpfs for the store"

    def write(self, job, mib):
        header = json.dumps({"w": {"dtype": "U8", "shape": [mib, 1 << 20],
                                   "data_offsets": [0, mib << 20]}}).encode()
        path = job.incoming("base") + "/rank/0/model.safetensors"
        models.write_file(path, struct.pack("<Q", len(header)) + header)
        os.truncate(path, 8 + len(header) + (mib << 20))

    def test_holes_that_there_is_no_room_for(self):
        job = self.new_job()
        self.write(job, 64)
        self.assertEqual(mount.error_of(job.commit, "base"), "ENOSPC")
        self.assertRegex(job.commit_error("base"), "allocating 64.0 MiB for .*a file with holes")
        self.write(job, 8)
        job.commit("base")
        with open(job.checkpoint("base", "model/w.npy"), "rb") as file:
            self.assertEqual(file.read()[-(8 << 20):], bytes(8 << 20))


if __name__ == "__main__":
    mount.main()
