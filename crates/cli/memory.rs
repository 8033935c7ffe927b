//! Free memory of this computer. Data that do not fit are refused before they are read: the allocator, or the
//! system, would end the program without a word about why.

/// Bytes of memory that can be had, where the system tells.
pub(crate) fn free() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kibibytes: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024.0)
}

/// For people.
pub(crate) fn gibibytes(bytes: f64) -> f64 {
    bytes / f64::from(1 << 30)
}
