#!/usr/bin/env bash
# Compiles the HIP files of what the example `sources` wrote, each for its own GPU, and prints what became of it.
#
#   kernels/hip_check.sh FOLDER [grep pattern of files]
#
# Debian: apt-get install clang-15 clang-tools-15 lld-15 llvm-15 rocm-device-libs libamdhip64-dev \
#                         libfile-which-perl liburi-encode-perl
#         export PATH=/usr/lib/llvm-15/bin:$PATH
# hipcc itself is taken from PATH, or out of its Debian package into FOLDER: once installed it brings a
# `hipconfig` of ROCm 5.2, and builds with the feature `rocm` stop at that version.
# HIPCC=another hipcc; JOBS=how many at once, all cores by default.
set -euo pipefail

folder=$(realpath "${1:?usage: hip_check.sh FOLDER [pattern]}")
pattern=${2:-.}
bitcode=/usr/lib/x86_64-linux-gnu/amdgcn/bitcode
tools=$folder/.tools
mkdir -p "$tools"

hipcc=${HIPCC:-$(command -v hipcc || true)}
if [ -z "$hipcc" ]; then
    hipcc=$tools/usr/bin/hipcc
    if [ ! -x "$hipcc" ]; then
        (cd "$tools" && apt-get download hipcc >/dev/null 2>&1 && dpkg -x hipcc_*.deb .)
    fi
    export HIP_PATH=/usr
fi

# Debian's device libraries know no RDNA 3, and of each GPU hold one number that is not in the others.
# With the number of gfx1100 they serve it: the instructions are clang's.
libraries=$tools/bitcode
if [ -d "$bitcode" ] && [ ! -e "$libraries/oclc_isa_version_1100.bc" ]; then
    mkdir -p "$libraries"
    ln -sf "$bitcode"/*.bc "$libraries"
    if [ ! -e "$libraries/oclc_isa_version_1100.bc" ]; then
        llvm-dis-15 "$bitcode/oclc_isa_version_1030.bc" -o - |
            sed 's/constant i32 10300/constant i32 11000/' |
            llvm-as-15 -o "$libraries/oclc_isa_version_1100.bc"
    fi
fi
flags=(--std=c++17 -O3 --cuda-device-only -Rpass-analysis=kernel-resource-usage)
[ -d "$libraries" ] && flags+=("--rocm-device-lib-path=$libraries")

# One file: its line of the table. What the compiler says goes to FILE.log.
one() {
    local file=$1 log=$folder/$1.log arch=${1%%/*} start result
    shift
    if grep -q '<hip/hip_bf16.h>' "$folder/$file" && [ "$bf16" = no ]; then
        echo "skipped,,,,,,$file"
        return
    fi
    start=$(date +%s%N)
    result=ok
    "$@" "--offload-arch=$arch" -c "$folder/$file" -o "$folder/$file.o" >"$log" 2>&1 || result=failed
    used() { sed -n "s/.*remark: *$1: \([0-9]*\).*/\1/p" "$log" | tail -n 1; }
    echo "$result,$((($(date +%s%N) - start) / 1000000)),$(used VGPRs),$(used 'VGPRs Spill')," \
        "$(used 'ScratchSize \[bytes\/lane\]'),$(used 'Occupancy \[waves\/SIMD\]'),$file" |
        tr -d ' '
}
export -f one
export folder
# The header came with ROCm 5.7.
bf16=no
for include in /usr/include "${HIP_PATH:-/opt/rocm}/include"; do
    if [ -e "$include/hip/hip_bf16.h" ]; then bf16=yes; fi
done
export bf16

"$hipcc" --version 2>/dev/null | head -n 2
table=$folder/table.csv
echo "result,ms,vgprs,vgprs_spilled,scratch_bytes,waves,file" >"$table"
tail -n +2 "$folder/manifest.csv" | cut -d , -f 1 | grep '\.hip$' | grep -e "$pattern" |
    xargs -P "${JOBS:-$(nproc)}" -I {} bash -c 'one "$@"' one {} "$hipcc" "${flags[@]}" |
    sort -t , -k 7 >>"$table"
cat "$table"
python3 - "$table" <<'PY'
import collections, csv, sys
rows = list(csv.DictReader(open(sys.argv[1])))
count = collections.Counter()
for row in rows:
    arch, name = row["file"].split("/", 1)
    count[arch, name.split("-", 1)[0], row["result"]] += 1
print()
for (arch, rows_type, result), n in sorted(count.items()):
    print(f"{arch} {rows_type}: {n} {result}")
failed = [row["file"] for row in rows if row["result"] == "failed"]
for file in failed[:10]:
    print(f"see {file}.log")
sys.exit(1 if failed or not any(row["result"] == "ok" for row in rows) else 0)
PY
