//! Gives the library a number of its kernels' source, for `source_hash`.

use std::path::PathBuf;
use std::{fs, io};

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-changed=src");
    println!("cargo::rerun-if-changed=build.rs");
    let files: io::Result<Vec<PathBuf>> =
        fs::read_dir("src")?.map(|entry| entry.map(|entry| entry.path())).collect();
    let mut files = files?;
    files.retain(|file| !file.to_string_lossy().ends_with("tests.rs"));
    files.sort();
    // FNV-1a, 64 bits.
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for file in files {
        let name = file.to_string_lossy().into_owned();
        for byte in name.into_bytes().into_iter().chain(fs::read(&file)?) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
    println!("cargo::rustc-env=LINATTN_KERNELS_SOURCE={hash:016x}");
    Ok(())
}
