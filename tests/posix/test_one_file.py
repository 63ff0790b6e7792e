"""One file, written, mapped, cut, punched and copied at random, against a copy of it in memory.

PTC_SEED replays, PTC_ROUNDS makes it longer.
"""
import ctypes
import errno
import mmap
import os
import random

import sides
from sides import mount

MOST = 600_000  # bytes of the file
KEEP_SIZE, PUNCH_HOLE, COLLAPSE_RANGE, ZERO_RANGE, INSERT_RANGE = 1, 2, 8, 16, 32
libc = ctypes.CDLL(None, use_errno=True)


def fallocate(fd, mode, offset, length):
    if libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length)) != 0:
        raise OSError(ctypes.get_errno(), "fallocate")


class OneFile(sides.mount.TestCase):
    def setUp(self):
        super().setUp()
        self.path = self.new_job().incoming("file")
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT)
        self.addCleanup(lambda: os.close(self.fd))
        self.model = bytearray()
        self.map = None  # of the whole file as it is long now

    def extent(self, dice, within):
        """Offset and length; half of them at borders of pages."""
        offset, length = dice.randrange(within + 1), dice.randrange(1, 70_000)
        if dice.random() < 0.5:
            offset, length = offset // 4096 * 4096, (length + 4095) // 4096 * 4096
        return offset, length

    def put(self, offset, data):
        if offset > len(self.model):
            self.model.extend(bytes(offset - len(self.model)))
        self.model[offset:offset + len(data)] = data

    def write(self, dice):
        offset, length = self.extent(dice, min(len(self.model) + 50_000, MOST))
        data = dice.randbytes(length)
        self.assertEqual(os.pwrite(self.fd, data, offset), length)
        self.put(offset, data)

    def append(self, dice):
        if len(self.model) > MOST:
            return
        data = dice.randbytes(dice.randrange(1, 9000))
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        os.write(fd, data)
        os.close(fd)
        self.model += data

    def read(self, dice):
        offset, length = self.extent(dice, len(self.model))
        self.assertTrue(os.pread(self.fd, length, offset) == self.model[offset:offset + length],
                        f"read of {length} at {offset}")

    def mapped_write(self, dice):
        if not self.model:
            return
        if self.map is None or len(self.map) != len(self.model):
            self.drop_map(dice)
            self.map = mmap.mmap(self.fd, len(self.model))
        offset, length = self.extent(dice, len(self.model) - 1)
        data = dice.randbytes(min(length, len(self.model) - offset))
        self.map[offset:offset + len(data)] = data
        self.put(offset, data)
        if dice.random() < 0.3:
            self.map.flush()

    def mapped_read(self, dice):
        if self.map is None or len(self.map) != len(self.model):
            return
        offset, length = self.extent(dice, len(self.model) - 1)
        self.assertTrue(self.map[offset:offset + length] == self.model[offset:offset + length],
                        f"mapped, {length} at {offset}")

    def drop_map(self, _):
        if self.map is not None:
            self.map.close()
        self.map = None

    def truncate(self, dice):
        size = dice.randrange(MOST)
        if dice.random() < 0.5:
            os.ftruncate(self.fd, size)
        else:
            os.truncate(self.path, size)
        del self.model[size:]
        self.model.extend(bytes(size - len(self.model)))

    def allocate(self, dice):
        offset, length = self.extent(dice, MOST)
        mode = dice.choice([0, KEEP_SIZE, KEEP_SIZE | PUNCH_HOLE, ZERO_RANGE, KEEP_SIZE | ZERO_RANGE,
                            COLLAPSE_RANGE, INSERT_RANGE, PUNCH_HOLE])
        try:
            fallocate(self.fd, mode, offset, length)
        except OSError as error:
            # What the store's file system cannot do either; then nothing may have changed.
            self.assertIn(error.errno, (errno.EOPNOTSUPP, errno.EINVAL), f"fallocate mode {mode}")
            self.assertNotIn(mode, (0, KEEP_SIZE, KEEP_SIZE | PUNCH_HOLE))
            return
        if mode & (PUNCH_HOLE | ZERO_RANGE):
            end = offset + length if mode == ZERO_RANGE else min(offset + length, len(self.model))
            if end > offset:
                self.put(offset, bytes(end - offset))
        elif mode == 0 and offset + length > len(self.model):
            self.model.extend(bytes(offset + length - len(self.model)))

    def copy(self, dice):
        """copy_file_range in the file itself; overlapping ends are refused."""
        source, length = self.extent(dice, len(self.model))
        target = dice.randrange(MOST)
        length = max(0, min(length, len(self.model) - source))
        try:
            done = os.copy_file_range(self.fd, self.fd, length, source, target)
        except OSError as error:
            self.assertEqual(error.errno, errno.EINVAL)
            self.assertLess(abs(source - target), length)
            return
        if done > 0:
            self.put(target, self.model[source:source + done])
        else:
            self.assertEqual(length, 0)

    def reopen(self, dice):
        self.drop_map(dice)
        os.close(self.fd)
        self.fd = os.open(self.path, os.O_RDWR)

    def sync(self, dice):
        dice.choice([os.fsync, os.fdatasync])(self.fd)

    def holes(self, _):
        """SEEK_DATA finds nothing but zeros left out; SEEK_HOLE ends at the end."""
        at = 0
        while at < len(self.model):
            try:
                data = os.lseek(self.fd, at, os.SEEK_DATA)
            except OSError as error:
                self.assertEqual(error.errno, errno.ENXIO)
                data = len(self.model)
            self.assertFalse(any(self.model[at:data]), f"data in a hole from {at} to {data}")
            if data >= len(self.model):
                return
            at = os.lseek(self.fd, data, os.SEEK_HOLE)
            self.assertGreater(at, data)

    def check_all(self):
        with open(self.path, "rb") as file:
            self.assertTrue(file.read() == self.model)
        self.assertEqual(os.stat(self.path).st_size, len(self.model))

    def test_random(self):
        seed = int(os.environ.get("PTC_SEED") or random.SystemRandom().randrange(1 << 32))
        rounds = int(os.environ.get("PTC_ROUNDS") or 6000)
        print(f"PTC_SEED={seed} PTC_ROUNDS={rounds}", flush=True)
        dice = random.Random(seed)
        steps = [self.write, self.write, self.read, self.read, self.mapped_write, self.mapped_write,
                 self.mapped_read, self.append, self.truncate, self.allocate, self.copy, self.reopen,
                 self.sync, self.drop_map, self.holes]
        history = []
        try:
            for number in range(rounds):
                step = dice.choice(steps)
                history.append(f"{number} {step.__name__} ({len(self.model)} bytes)")
                step(dice)
                if number % 100 == 0:
                    self.check_all()
            self.check_all()
        except BaseException:
            print(f"PTC_SEED={seed}, the last steps:", *history[-15:], sep="\n  ", flush=True)
            raise


if __name__ == "__main__":
    mount.main()
