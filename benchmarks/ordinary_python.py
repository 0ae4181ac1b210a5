"""Ordinary programs in the tool `python`: the same output as in plain Python, else it ends 1.

    python benchmarks/ordinary_python.py [--json [PATH]]

Each program runs by itself twice, in a new folder under the interpreter of this script: as a file of plain Python, and as
one call of a session that may import the packages which the programs name. What needs a package that is not installed
here is named as not tried.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("contrib", ".")]

from agent_environments.tools.tool import ToolError
from loop_contrib.code_tool.python_tool import PythonSessions

DEADLINE_S = 60.0
LIMITS = {"memory_mb": 2048, "folder_mb": 64, "max_characters": 20_000, "deadline_s": DEADLINE_S}
VARIABLES = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "MPLBACKEND": "agg", "PYTHONHASHSEED": "0"}

PROGRAMS = {
    "unittest": """
import sys, unittest
class Test(unittest.TestCase):
    def test_wrong(self): self.assertEqual(1, 2)
    def test_right(self): self.assertTrue(True)
result = unittest.main(argv=["x"], exit=False, testRunner=unittest.TextTestRunner(stream=open("log", "w"))).result
print(result.testsRun, len(result.failures))
""",
    "doctest": """
import contextlib, doctest, io
def twice(x):
    '''
    >>> twice(2)
    5
    '''
    return 2 * x
with contextlib.redirect_stdout(io.StringIO()): result = doctest.testmod(verbose=False)
print(result)
""",
    "pickle of an own class": """
import pickle
class A:
    def __init__(self): self.x = 3
print(pickle.loads(pickle.dumps(A())).x, pickle.loads(pickle.dumps(A)).__name__)
""",
    "copy and weakref": """
import copy, weakref
class A: pass
a = A(); a.b = [1]
c = copy.deepcopy(a)
print(c.b, c.b is a.b, weakref.ref(a)() is a)
""",
    "sqlite in a file": """
import sqlite3
with sqlite3.connect("a.db") as c:
    c.execute("create table t (n)"); c.executemany("insert into t values (?)", [(i,) for i in range(9)])
c.close()
print(sqlite3.connect("a.db").execute("select sum(n) from t").fetchone())
""",
    "asyncio": """
import asyncio
async def one(n):
    await asyncio.sleep(0.01 * n); return n
async def main():
    process = await asyncio.create_subprocess_exec("echo", "hi", stdout=asyncio.subprocess.PIPE)
    return await asyncio.gather(*map(one, range(3))), (await process.communicate())[0]
print(asyncio.run(main()))
""",
    "asyncio server": """
import asyncio
async def serve(reader, writer):
    writer.write((await reader.readline()).upper()); await writer.drain(); writer.close()
async def main():
    server = await asyncio.start_server(serve, "localhost", 0)
    reader, writer = await asyncio.open_connection("localhost", server.sockets[0].getsockname()[1])
    writer.write(b"hello\\n")
    print(await reader.read()); writer.close()
asyncio.run(main())
""",
    "subprocess": """
import subprocess, sys
print(subprocess.run(["sh", "-c", "echo out; echo err >&2; exit 3"], capture_output=True, text=True))
print(subprocess.check_output([sys.executable, "-c", "print(6 * 7)"]))
""",
    "os.system and its output": "import os, sys\nprint('before', flush=True)\nprint(os.system('echo in the middle'))\n",
    "reload of a module": """
import importlib, sys
open("sol.py", "w").write("def f(): return 1\\n")
sys.path.insert(0, "")
import sol
first = sol.f()
open("sol.py", "w").write("def f(): return 2222\\n")
print(first, importlib.reload(sol).f())
del sys.modules["sol"]
import sol
print(sol.f())
""",
    "a package with a relative import": """
import os, sys
sys.path.insert(0, "")
os.makedirs("pack/sub"); open("pack/__init__.py", "w").write("from .sub import x\\n")
open("pack/sub/__init__.py", "w").write("x = 5\\n")
import pack
print(pack.x, os.path.basename(pack.sub.__file__), pack.sub.__name__)
""",
    "shutil": """
import os, shutil
os.mkdir("a"); open("a/x", "w").write("hello"); os.chmod("a/x", 0o640); os.utime("a/x", (5, 6))
shutil.copytree("a", "b"); shutil.copy2("a/x", "c"); shutil.copy("a/x", "d"); shutil.move("d", "b/e")
print(sorted(os.listdir("b")), oct(os.stat("c").st_mode & 0o777), os.stat("c").st_mtime, shutil.which("sh") is not None)
shutil.make_archive("z", "gztar", "b"); shutil.rmtree("a")
print(os.path.exists("a"), os.path.getsize("z.tar.gz") > 50, shutil.disk_usage(".").total > 0)
""",
    "pathlib": """
from pathlib import Path
p = Path("a/b"); p.mkdir(parents=True); (p / "x.txt").write_text("hé"); (p / "y").touch(); (p / "l").symlink_to("x.txt")
print(sorted(map(str, Path(".").rglob("*.txt"))), (p / "y").exists(), (p / "l").read_text(), (p / "l").is_symlink())
(p / "x.txt").rename(p / "z.txt"); print(sorted(q.name for q in p.iterdir()), (p / "z.txt").stat().st_size)
print(Path.home().is_dir(), Path.cwd().is_absolute())
""",
    "os.walk and glob": """
import glob, os
os.makedirs("a/b"); open("a/b/x.csv", "w"); open("a/y.csv", "w")
print(sorted(glob.glob("**/*.csv", recursive=True)), [(sorted(d), sorted(f)) for _, d, f in os.walk("a")])
print(sorted((e.name, e.is_dir()) for e in os.scandir("a")))
""",
    "modes, times, links": """
import os, stat
open("x", "w").write("abc"); os.link("x", "y"); os.symlink("x", "s"); os.truncate("x", 2)
print(os.stat("y").st_nlink, os.readlink("s"), os.path.samefile("x", "y"), os.path.getsize("y"), os.access("x", os.W_OK))
os.utime("x", ns=(10, 20)); os.chmod("x", 0o400)
print(os.stat("x").st_mtime_ns, stat.filemode(os.stat("x").st_mode), os.umask(0o22))
os.mkfifo("p"); print(stat.S_ISFIFO(os.stat("p").st_mode)); os.chdir("/"); print(os.getcwd())
""",
    "filecmp and difflib": """
import difflib, filecmp
open("x", "w").write("a\\nb\\n"); open("y", "w").write("a\\nc\\n")
print(filecmp.cmp("x", "y", shallow=False), filecmp.cmp("x", "x"))
print("".join(difflib.unified_diff(open("x").readlines(), open("y").readlines())))
""",
    "logging": """
import logging, sys
logging.basicConfig(level=20, stream=sys.stdout, format="%(levelname)s %(name)s %(message)s")
logging.info("one"); logging.getLogger("a.b").warning("two")
handler = logging.FileHandler("log"); logging.getLogger("f").addHandler(handler); logging.getLogger("f").error("three")
print(open("log").read())
""",
    "standard output, its buffer and redirection": """
import contextlib, io, sys
out = sys.stdout
print("a", file=out, flush=True); sys.stdout.buffer.write(b"bytes\\n"); sys.stdout.flush()
with contextlib.redirect_stdout(io.StringIO()) as caught: print("caught")
sys.stdout.reconfigure(encoding="utf-8"); print(caught.getvalue(), sys.stdout.encoding, sys.stdin.read() == "")
""",
    "zipfile and tarfile": """
import tarfile, zipfile
open("x", "w").write("abc")
with zipfile.ZipFile("x.zip", "w") as z: z.write("x"); z.writestr("y", "de")
print(zipfile.ZipFile("x.zip").namelist(), zipfile.ZipFile("x.zip").read("x"))
with tarfile.open("x.tgz", "w:gz") as t: t.add("x")
print(tarfile.open("x.tgz").getnames(), zipfile.is_zipfile("x"))
""",
    "gzip, bz2, lzma": """
import bz2, gzip, lzma
for kind in (bz2, gzip, lzma):
    with kind.open("x", "wb") as f: f.write(b"abc" * 100)
    print(kind.open("x").read()[:6], kind.decompress(kind.compress(b"q")))
""",
    "tempfile": """
import os, tempfile
with tempfile.TemporaryDirectory() as d, tempfile.NamedTemporaryFile(dir=d) as f:
    f.write(b"abc"); f.flush(); print(os.path.getsize(f.name), len(os.listdir(d)))
print(os.path.exists(d), os.path.isdir(tempfile.gettempdir()))
with tempfile.TemporaryFile() as f: f.write(b"x"); f.seek(0); print(f.read())
with tempfile.SpooledTemporaryFile() as f: f.write(b"y"); f.rollover(); f.seek(0); print(f.read())
""",
    "threads": """
import queue, threading
q = queue.Queue()
def work(): q.put(threading.current_thread().name)
threads = [threading.Thread(target=work, name=f"t{i}") for i in range(5)]
[t.start() for t in threads]; [t.join() for t in threads]
print(sorted(q.queue), threading.active_count())
""",
    "pools": """
import concurrent.futures, multiprocessing
with concurrent.futures.ThreadPoolExecutor(4) as pool: print(list(pool.map(len, ["a", "bb"])))
def square(x): return x * x
with concurrent.futures.ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
    print(list(pool.map(square, range(4))))
with multiprocessing.get_context("fork").Pool(2) as pool: print(pool.map(square, range(4)))
""",
    "processes that share memory": """
import multiprocessing
m = multiprocessing.get_context("fork")
v, (here, there) = m.Value("i", 0), m.Pipe()
def work():
    with v.get_lock(): v.value += 1
    there.send("hi")
p = m.Process(target=work); p.start(); print(here.recv()); p.join(); print(v.value, p.exitcode)
""",
    "os.fork and pipes": """
import os
r, w = os.pipe()
if (pid := os.fork()) == 0:
    os.write(w, b"from the child"); os._exit(3)
print(os.read(r, 99), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""",
    "signals": """
import os, signal, time
seen = []
signal.signal(signal.SIGUSR1, lambda *_: seen.append("usr1")); os.kill(os.getpid(), signal.SIGUSR1)
signal.signal(signal.SIGALRM, lambda *_: seen.append("alarm")); signal.setitimer(signal.ITIMER_REAL, 0.05); time.sleep(0.5)
print(seen, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
""",
    "mmap": """
import mmap
open("x", "wb").write(b"hello world")
with open("x", "r+b") as f, mmap.mmap(f.fileno(), 0) as m: m[:5] = b"HELLO"; print(m.find(b"w"), m[:])
print(open("x").read(), len(mmap.mmap(-1, 4096)))
""",
    "sockets and a web server": """
import http.server, threading, urllib.request
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.send_response(200); self.end_headers(); self.wfile.write(b"served " + self.path.encode())
    def log_message(self, *_): pass
server = http.server.HTTPServer(("localhost", 0), H)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(urllib.request.urlopen(f"http://localhost:{server.server_port}/x").read()); server.shutdown()
""",
    "unix sockets and select": """
import select, socket
a, b = socket.socketpair(); a.send(b"x"); print(select.select([b], [], [], 1)[0] == [b], b.recv(9))
s = socket.socket(socket.AF_UNIX); s.bind("sock"); s.listen()
c = socket.socket(socket.AF_UNIX); c.connect("sock"); d = s.accept()[0]; c.sendall(b"hi"); print(d.recv(9))
""",
    "ctypes": """
import ctypes, ctypes.util
libc = ctypes.CDLL(None); print(libc.strlen(b"abc"))
callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(lambda x: x + 1); print(callback(4))
""",
    "inspect and dis": """
import dis, inspect
def half(x: int) -> float:
    'Halve.'
    return x / 2
print(inspect.getsource(half)); print(inspect.signature(half), inspect.getdoc(half), half.__module__)
print([i.opname for i in dis.get_instructions(half)][-1], inspect.getmodule(half) is __import__("sys").modules["__main__"])
""",
    "names of __main__": """
import __main__, sys
x = 5
print(__name__, __main__.x, sys.modules["__main__"].__dict__ is globals(), vars() is globals(), len(sys.argv))
""",
    "dataclasses, typing, enum": """
import dataclasses, enum, typing
@dataclasses.dataclass(order=True)
class P: x: int; y: "list[int]" = dataclasses.field(default_factory=list)
class C(enum.Enum): A = 1
print(P(3), typing.get_type_hints(P), dataclasses.asdict(P(1)), C.A, dataclasses.fields(P)[0].type)
""",
    "json, csv, configparser": """
import configparser, csv, io, json
json.dump({"a": [1, None]}, open("x.json", "w")); print(json.load(open("x.json")))
w = csv.writer(open("x.csv", "w", newline="")); w.writerows([["a", "b"], [1, "x,y"]]); del w
print(list(csv.DictReader(open("x.csv"))))
c = configparser.ConfigParser(); c.read_string("[s]\\nk = v"); print(c["s"]["k"])
""",
    "datetime and zoneinfo": """
import datetime, time, zoneinfo
print(datetime.datetime(2024, 7, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Oslo")).isoformat(), len(zoneinfo.available_timezones()) > 300)
print(datetime.date.today() >= datetime.date(2024, 1, 1), time.strftime("%Y", time.gmtime(0)))
""",
    "locale, unicode, decimal": """
import decimal, fractions, locale, unicodedata
print("naïve → ☃", unicodedata.name("é"), decimal.Decimal("0.1") + 2, fractions.Fraction(3, 6), locale.getpreferredencoding())
open("ünï", "w").write("é"); print(open("ünï").read(), __import__("os").listdir("."))
""",
    "random and hashes": """
import hashlib, random, secrets, uuid
random.seed(1); print(random.random(), hashlib.sha256(b"x").hexdigest()[:8], len(secrets.token_hex(4)), uuid.UUID(int=5))
print(hash("a"), list({"a", "b", "c", "d"}), len(str(uuid.uuid4())))
""",
    "compile, exec, importlib, runpy": """
import py_compile, runpy, importlib.util, os
open("m.py", "w").write("if __name__ == '__main__': print('as main')\\nx = 7\\n")
print(runpy.run_path("m.py", run_name="__main__")["x"], os.path.basename(py_compile.compile("m.py", cfile="m.pyc")))
spec = importlib.util.spec_from_file_location("m", "m.py"); m = importlib.util.module_from_spec(spec); spec.loader.exec_module(m)
print(m.x, eval("m.x + 1"))
""",
    "an error that is caught and its traceback": """
import traceback, warnings
def f(): return 1 / 0
try: f()
except ZeroDivisionError as error: print(traceback.format_exc().splitlines()[-1], error.__traceback__.tb_lineno)
with warnings.catch_warnings(record=True) as caught: warnings.simplefilter("always"); warnings.warn("w"); print(len(caught))
""",
    "limits, platform, user": """
import getpass, os, platform, resource, sys
print(platform.system(), bool(getpass.getuser()), os.cpu_count() > 0, resource.getrusage(0).ru_maxrss > 0, sys.getrecursionlimit())
print(os.path.expanduser("~") != "~", bool(os.environ["PATH"]), os.path.exists("/proc/self/fd"), len(os.listdir("/proc/self/fd")) > 2)
""",
    "a terminal of its own": """
import os, pty
pid, fd = pty.fork()
if pid == 0: os.execvp("echo", ["echo", "on a terminal"])
print(os.read(fd, 99), os.waitpid(pid, 0)[1])
""",
    "a virtual environment": """
import subprocess, sys, venv
venv.create("v", with_pip=False); print(subprocess.check_output(["v/bin/python", "-c", "import sys; print(sys.prefix != sys.base_prefix)"]))
""",
    "numpy: random, fft, linalg": """
import numpy as np
print(np.random.default_rng(0).integers(9, size=3), np.fft.fft([1, 2, 3]).round(3), np.linalg.inv([[2.0, 1], [1, 1]]), np.random.RandomState(0).rand())
""",
    "numpy: save, load, tofile, memmap": """
import numpy as np
np.save("x.npy", np.arange(5)); print(np.load("x.npy"), np.load("x.npy", mmap_mode="r")[2])
np.arange(3.0).tofile("y"); print(np.fromfile("y")); np.savez("z", a=[1]); print(np.load("z.npz")["a"])
m = np.memmap("m", dtype="i4", mode="w+", shape=(3,)); m[:] = 7; m.flush(); print(np.memmap("m", dtype="i4"))
np.savetxt("t", [[1, 2]]); print(np.loadtxt("t"))
""",
    "pyplot": """
import matplotlib.pyplot as plt, os
plt.plot([1, 2, 3]); plt.title("t"); plt.savefig("p.png"); plt.savefig("p.svg"); print(os.path.getsize("p.png") > 1000, open("p.svg").read()[:5])
""",
    "pandas": """
import pandas as pd
d = pd.DataFrame({"a": [1, 2, 2], "b": [3.0, 4, 5]}); print(d.groupby("a").sum()); d.to_csv("x.csv"); print(pd.read_csv("x.csv").shape)
d.to_pickle("x.pkl"); print(pd.read_pickle("x.pkl").equals(d), pd.to_datetime("2024-02-03").day_name(), d.describe().loc["mean", "b"])
""",
    "pandas: parquet": """
import pandas, pyarrow
d = pandas.DataFrame({"a": [1, 2]}); d.to_parquet("x.parquet"); print(pandas.read_parquet("x.parquet").a.sum())
""",
    "scipy": """
import scipy.optimize, scipy.sparse.linalg, scipy.stats
print(round(scipy.optimize.brentq(lambda x: x * x - 2, 0, 2), 6), scipy.stats.norm.cdf(0), scipy.sparse.eye(3).nnz)
""",
    "sklearn": """
from sklearn.linear_model import LinearRegression
print(LinearRegression().fit([[0], [1]], [0, 2]).coef_.round(6))
""",
    "sympy": "import sympy\nx = sympy.Symbol('x')\nprint(sympy.integrate(x**2, x), sympy.solve(x**2 - 4))\n",
    "PIL": "import PIL.Image\nPIL.Image.new('RGB', (4, 4), 'red').save('x.png')\nprint(PIL.Image.open('x.png').getpixel((1, 1)))\n",
    "yaml": "import yaml\nprint(yaml.safe_load('a: [1, 2]'), yaml.dump({'b': 1}))\n",
}
PACKAGES = ("numpy", "pandas", "matplotlib", "scipy", "sklearn", "sympy", "PIL", "pyarrow", "yaml")


def needed(program: str) -> list[str]:
    """The packages that a program imports."""
    return [
        name
        for name in PACKAGES
        if f"import {name}" in program or f"from {name}" in program or f", {name}\n" in program
    ]


def plain(program: str) -> str:
    """What plain Python prints."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as home:
        file = Path(home, "program.py")
        file.write_text(program)
        done = subprocess.run(
            [sys.executable, str(file)],
            cwd=folder,
            env={**VARIABLES, "HOME": home, "USER": "somebody"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=DEADLINE_S,
        )
    return done.stdout.decode(errors="replace").strip()


async def tried(packages: list[str], programs: dict[str, str]) -> tuple[str | None, dict[str, str]]:
    """Why there was no box, if there was none, and what each program printed as one call of a session."""
    sessions = PythonSessions({**LIMITS, "packages": packages, "python": sys.executable})
    await sessions.open()
    printed = {}
    for name, program in programs.items():
        session = sessions.session()
        try:
            shown = await session.tools[0].call({"code": program}, None)  # type: ignore[arg-type]  # asks no process
            printed[name] = shown.strip()
        except ToolError as error:
            printed[name] = f"ToolError: {error}"
        finally:
            await session.close()
    sealed = (await sessions._server.start())["sealed"]
    await sessions.close()
    return sealed, printed


def main() -> int:
    """Run all, print a line for each, and return 1 where one differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", nargs="?", const="-", help="write the rows there, or print them")
    options = parser.parse_args()
    here = [name for name in PACKAGES if importlib.util.find_spec(name) is not None]
    programs = {name: text for name, text in PROGRAMS.items() if set(needed(text)) <= set(here)}
    sealed, printed = asyncio.run(tried(here, programs))
    rows = []
    for name in PROGRAMS:
        row = {"program": name, "outcome": "not tried: a package is not installed"}
        if name in programs:
            expected = plain(programs[name])
            row["outcome"] = "same" if printed[name] == expected else "differs"
            if row["outcome"] == "differs":
                row |= {"plain": expected, "session": printed[name]}
        rows.append(row)
        if options.json != "-":
            print(*row.values(), sep=" | ", flush=True)
    counts = {kind: sum(row["outcome"].startswith(kind) for row in rows) for kind in ("same", "differs", "not tried")}
    text = json.dumps({"sealed": sealed, "python": sys.version.split()[0], **counts, "rows": rows}, indent=1)
    if options.json == "-":
        print(text)
    elif options.json:
        Path(options.json).write_text(text + "\n")
    if options.json != "-":
        print(counts, f"(no box: {sealed})" if sealed else "(in a box)")
    return 1 if counts["differs"] else 0


if __name__ == "__main__":
    sys.exit(main())
