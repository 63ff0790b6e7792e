"""A private authority and its certificates, made with the openssl program."""
import os
import subprocess


def openssl(directory, *arguments):
    done = subprocess.run(["openssl", *arguments], cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"openssl {' '.join(arguments)}: {done.stderr.strip()}")


class Authority:
    """Keeps ca.pem, ca.key, and each holder's <holder>.pem and <holder>.key in a directory of its own."""
    NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")

    def __init__(self, directory):
        self.directory = directory
        os.mkdir(directory, 0o700)
        openssl(directory, "req", "-x509", *self.NEW_KEY, "-days", "2", "-subj", "/O=ca",
                "-keyout", "ca.key", "-out", "ca.pem")

    @property
    def ca(self):
        return self.file("ca.pem")

    def file(self, name):
        return os.path.join(self.directory, name)

    def issue(self, holder, *names):
        """A certificate for the names ("DNS:w1", "IP:10.0.0.1"), by default the holder's; its file and its key's."""
        with open(self.file(holder + ".names"), "w", encoding="ascii") as file:
            file.write("subjectAltName = " + ", ".join(names or (f"DNS:{holder}",)) + "\n")
        openssl(self.directory, "req", *self.NEW_KEY, "-subj", f"/CN={holder}", "-keyout", holder + ".key",
                "-out", holder + ".csr")
        openssl(self.directory, "x509", "-req", "-in", holder + ".csr", "-CA", "ca.pem", "-CAkey", "ca.key",
                "-CAcreateserial", "-days", "2", "-extfile", holder + ".names", "-out", holder + ".pem")
        os.chmod(self.file(holder + ".key"), 0o600)
        return self.file(holder + ".pem"), self.file(holder + ".key")
