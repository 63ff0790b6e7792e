"""Real readers on what the trees hold: tarfile, webdataset, streaming and datasets where they are installed, NumPy."""
import glob
import io
import json
import os
import random
import struct
import subprocess
import sys
import tarfile
import tempfile
import unittest

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "clients"))
from readers import optional  # noqa: E402

SEED = int(os.environ.get("PTC_SEED", random.randrange(1 << 32)))
WRITE_TREES = os.path.join(os.environ.get("PTC_BIN_DIR", "build/bin"), "write_trees")
PER_SHARD = 7


numpy, webdataset, streaming, datasets = map(optional, ("numpy", "webdataset", "streaming", "datasets"))


def contents(path):
    with open(path, "rb") as file:
        return file.read()


def crc32c(data, table=[]):
    if not table:
        for byte in range(256):
            for _ in range(8):
                byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
            table.append(byte)
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def tfrecord(data):
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked(length)) + data + struct.pack("<I", masked(data))


def read_tfrecords(path):
    data = contents(path)
    while data:
        length, crc = struct.unpack_from("<QI", data)
        record, end = data[12:12 + length], data[12 + length:16 + length]
        assert crc == masked(data[:8]) and end == struct.pack("<I", masked(record))
        yield record
        data = data[16 + length:]


class Readers(unittest.TestCase):
    def setUp(self):
        self.random = random.Random(SEED)
        folder = tempfile.TemporaryDirectory(prefix="ptc-readers-")
        self.addCleanup(folder.cleanup)
        self.source, self.out = folder.name + "/source", folder.name + "/out"
        os.makedirs(self.source)

    def blob(self, most=3000):
        return self.random.randbytes(self.random.randrange(most))

    def trees(self):
        subprocess.run([WRITE_TREES, self.source, self.out, str(PER_SHARD)], check=True)
        return sorted(os.listdir(self.out))

    def shards(self, tree):
        return sorted(glob.glob(f"{self.out}/{tree}/*.{tree}"))

    def check_tar(self, expected):
        """`expected`: of each sample, in the order of the source, (key or None, {extension: bytes})."""
        expected = [(key or str(i), fields) for i, (key, fields) in enumerate(expected)][::-1]
        found = {}
        for path in self.shards("tar"):
            with tarfile.open(path) as tar:
                for member in tar:
                    self.assertTrue(member.isreg())
                    found[member.name] = tar.extractfile(member).read()
        wanted = {f"{key}.{name}": data for key, fields in expected for name, data in fields.items()}
        self.assertEqual(list(found), list(wanted) if expected[0][0][0] == "d" else sorted(
            wanted, key=lambda name: (-int(name.split(".")[0]), name)))
        self.assertEqual(found, wanted)
        if webdataset:
            read = webdataset.WebDataset(self.shards("tar"), shardshuffle=False, nodesplitter=None)
            for sample, (key, fields) in zip(read, expected, strict=True):
                self.assertEqual(sample["__key__"], key)
                self.assertEqual({name: data for name, data in sample.items() if name[0] != "_"}, fields)

    def check_mds(self, expected):
        index = json.loads(contents(self.out + "/mds/index.json"))
        samples = []
        for shard in index["shards"]:
            path = f"{self.out}/mds/{shard['raw_data']['basename']}"
            data = contents(path)
            self.assertEqual(len(data), shard["raw_data"]["bytes"])
            count, = struct.unpack_from("<I", data)
            self.assertEqual(count, shard["samples"])
            places = struct.unpack_from(f"<{count + 1}I", data, 4)
            self.assertEqual(places[-1], len(data))
            for begin, end in zip(places, places[1:]):
                sizes = list(shard["column_sizes"])
                for i, size in enumerate(sizes):
                    if size is None:
                        sizes[i], = struct.unpack_from("<I", data, begin)
                        begin += 4
                sample = {}
                for name, size in zip(shard["column_names"], sizes):
                    sample[name], begin = data[begin:begin + size], begin + size
                self.assertEqual(begin, end)
                samples.append(sample)
        self.assertEqual(samples, expected[::-1])
        if streaming:
            read = streaming.StreamingDataset(local=self.out + "/mds", remote=None, shuffle=False, batch_size=1,
                                              num_canonical_nodes=1)
            self.assertEqual([dict(read[i]) for i in range(len(read))], expected[::-1])

    def check_tfrecord(self, expected):
        self.assertEqual([r for path in self.shards("tfrecord") for r in read_tfrecords(path)], expected[::-1])

    def check_files(self, expected):
        files = {name: contents(f"{self.out}/files/{name}") for name in os.listdir(self.out + "/files")}
        last = len(expected) - 1
        self.assertEqual(files, {f"{last - i:08}_{i}.{name}": data
                                 for i, fields in enumerate(expected) for name, data in fields.items()})

    def test_tar(self):
        for tar_format in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
            with self.subTest(tar_format=tar_format):
                self.setUp()
                samples = []
                for shard in range(3):
                    with tarfile.open(f"{self.source}/{shard}.tar", "w", format=tar_format) as tar:
                        folder = tarfile.TarInfo(f"d{shard}")
                        folder.type = tarfile.DIRTYPE
                        tar.addfile(folder)
                        for i in range(11):
                            long = "n" * 90 + "/" if tar_format == tarfile.USTAR_FORMAT else "ü" * 150
                            key = f"d{shard}/{'k' if i % 4 else long}{i:03}"
                            fields = {"jpg": self.blob(), "seg.png": self.blob(2), "json": b"{}"}
                            samples.append((key, fields))
                            for name, data in fields.items():
                                member = tarfile.TarInfo(f"{key}.{name}")
                                member.size, member.mtime = len(data), 1234567890.5
                                tar.addfile(member, io.BytesIO(data))
                self.assertEqual(self.trees(), ["files", "mds", "tar"])
                self.check_tar(samples)
                self.check_mds([fields for _, fields in samples])
                self.check_files([fields for _, fields in samples])

    def test_webdataset_writer(self):
        if not webdataset:
            self.skipTest("webdataset is not installed")
        samples = [(f"d{i:05}", {"txt": self.blob(), "cls": b"%d" % i}) for i in range(20)]
        with webdataset.TarWriter(self.source + "/a.tar") as writer:
            for key, fields in samples:
                writer.write({"__key__": key, **fields})
        self.trees()
        self.check_mds([fields for _, fields in samples])
        self.check_files([fields for _, fields in samples])

    def test_mds(self):
        if not streaming:
            self.skipTest("mosaicml-streaming is not installed")
        columns = {"x": "bytes", "id": "bytes"}
        samples = [{"x": self.blob(), "id": b"%08d" % i} for i in range(40)]
        with streaming.MDSWriter(out=self.source, columns=columns, size_limit=8000) as writer:
            for sample in samples:
                writer.write(sample)
        self.assertEqual(self.trees(), ["files", "mds", "tar"])
        self.check_mds(samples)
        self.check_tar([(None, sample) for sample in samples])
        self.check_files(samples)

    def test_tfrecord(self):
        records = [self.blob() for _ in range(33)]
        for shard in range(3):
            with open(f"{self.source}/{shard}.tfrecord", "wb") as out:
                out.writelines(map(tfrecord, records[shard * 11:shard * 11 + 11]))
        self.assertEqual(self.trees(), ["files", "mds", "tar", "tfrecord"])
        self.check_tfrecord(records)
        self.check_tar([(None, {"bin": record}) for record in records])
        self.check_mds([{"bin": record} for record in records])
        self.check_files([{"bin": record} for record in records])

    def test_jsonl(self):
        objects = [{"n": i, "text": "x" * self.random.randrange(200)} for i in range(30)]
        for shard in range(3):
            with open(f"{self.source}/{shard}.jsonl", "w") as out:
                out.write("\n".join(map(json.dumps, objects[shard * 10:shard * 10 + 10])))
        self.assertEqual(self.trees(), ["files", "jsonl", "mds", "tar", "tfrecord"])
        read = [json.loads(line) for path in self.shards("jsonl") for line in contents(path).splitlines()]
        self.assertEqual(read, objects[::-1])
        self.check_tar([(None, {"json": json.dumps(o).encode() + b"\n"}) for o in objects])
        self.check_tfrecord([json.dumps(o).encode() + b"\n" for o in objects])
        if datasets:
            read = datasets.load_dataset("json", data_files=self.shards("jsonl"), split="train", streaming=True)
            self.assertEqual(list(read), objects[::-1])

    def test_files(self):
        samples = []
        for i in range(30):
            os.makedirs(f"{self.source}/{i // 10}", exist_ok=True)
            samples.append({"jpg" if i % 2 else "png": self.blob()})
            for name, data in samples[-1].items():
                with open(f"{self.source}/{i // 10}/{i:03}.{name}", "wb") as out:
                    out.write(data)
        self.assertEqual(self.trees(), ["files", "tar", "tfrecord"])
        self.check_files(samples)
        self.check_tar([(None, sample) for sample in samples])
        self.check_tfrecord([data for sample in samples for data in sample.values()])

    def test_megatron(self):
        if not numpy:
            self.skipTest("NumPy is not installed")
        sequences = [[self.random.randrange(65536) for _ in range(self.random.randrange(500))] for _ in range(40)]
        for shard in range(2):
            some = [numpy.array(s, dtype=numpy.uint16) for s in sequences[shard * 20:shard * 20 + 20]]
            lengths = numpy.array([len(s) for s in some], dtype=numpy.int32)
            places = numpy.concatenate([[0], numpy.cumsum(lengths, dtype=numpy.int64)[:-1] * 2])
            with open(f"{self.source}/{shard}.bin", "wb") as out:
                out.writelines(s.tobytes() for s in some)
            with open(f"{self.source}/{shard}.idx", "wb") as out:
                out.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 20, 21) + lengths.tobytes() +
                          places.astype(numpy.int64).tobytes() + numpy.arange(21, dtype=numpy.int64).tobytes())
        self.assertEqual(self.trees(), ["files", "mds", "megatron", "tar", "tfrecord"])
        # As Megatron's _IndexReader does it.
        with open(self.out + "/megatron/train.idx", "rb") as idx:
            self.assertEqual(idx.read(9), b"MMIDIDX\0\0")
            version, dtype, count, documents = struct.unpack("<QBQQ", idx.read(25))
            offset = idx.tell()
        self.assertEqual((version, dtype, count, documents), (1, 8, 40, 41))
        buffer = memoryview(numpy.memmap(self.out + "/megatron/train.idx", mode="r", order="C"))
        lengths = numpy.frombuffer(buffer, dtype=numpy.int32, count=count, offset=offset)
        places = numpy.frombuffer(buffer, dtype=numpy.int64, count=count, offset=offset + lengths.nbytes)
        bounds = numpy.frombuffer(buffer, dtype=numpy.int64, count=documents,
                                  offset=offset + lengths.nbytes + places.nbytes)
        tokens = numpy.memmap(self.out + "/megatron/train.bin", mode="r", order="C")
        self.assertEqual(list(bounds), list(range(41)))
        read = [list(numpy.frombuffer(tokens, dtype=numpy.uint16, count=length, offset=place))
                for length, place in zip(lengths, places)]
        self.assertEqual(read, sequences[::-1])

    @unittest.skipUnless(webdataset, "webdataset is not installed")
    def test_members_count_as_webdataset_counts_them(self):
        """What macOS adds, and names between underscores: the same samples are read from the trees and from the source."""
        names = ["__top__", "__meta__/a.txt", "__MACOSX/d/._a.txt", "d/._a.txt", "d/a.txt", "d/._b.txt", "d/b.txt",
                 "._c.txt", "c.txt", "v1.0/._e.txt", "v1.0/e.txt", "./._f.txt", "./f.txt", "__x__.txt", "__y__/z/k.txt",
                 "q/__m__/k.txt", "____/k.txt", "___/k.txt", "__/k.txt", "m/._g.txt", "m/._h.txt"]
        with tarfile.open(self.source + "/0.tar", "w") as tar:
            for number, name in enumerate(names):
                content = f"{number}".encode()
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
        self.trees()

        def samples(shards):
            read = webdataset.WebDataset(shards, shardshuffle=False, nodesplitter=None)
            return [{name: data for name, data in sample.items() if not name.startswith("__")} for sample in read]
        self.assertEqual(samples(self.shards("tar"))[::-1], samples([self.source + "/0.tar"]))


if __name__ == "__main__":
    print(f"PTC_SEED={SEED}")
    unittest.main(verbosity=2, warnings="ignore")
