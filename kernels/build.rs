//! Gives the library a number of its kernels' source, for `source_hash` and every kernel's cache key.

use std::path::{Path, PathBuf};
use std::{fs, io};

fn main() -> io::Result<()> {
    println!("cargo::rerun-if-changed=src");
    println!("cargo::rerun-if-changed=build.rs");
    let mut files = vec![];
    collect(Path::new("src"), &mut files)?;
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

/// All files under `folder`, in folders of folders too.
fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        match path.is_dir() {
            true => collect(&path, files)?,
            false => files.push(path),
        }
    }
    Ok(())
}
