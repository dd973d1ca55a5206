"""The folder `compression` leads on to the standard library's package of that name, where there is one."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_shell_in_the_checkout_still_finds_the_standard_library(tmp_path):
    # Python 3.14 has compression.zstd, and gzip imports from that package; here it is made up.
    (tmp_path / "compression" / "zstd").mkdir(parents=True)
    (tmp_path / "compression" / "zstd" / "__init__.py").write_text("name = 'from the library'\n")
    code = "import sys; sys.path.append(sys.argv[1]); from compression import zstd; print(zstd.name)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "from the library", done.stderr


def test_the_package_is_ours_under_its_import_name():
    import mmrl.compression

    assert Path(mmrl.compression.__file__).resolve().parent == ROOT / "compression"
