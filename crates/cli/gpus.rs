//! GPUs as the system lists them, without asking a driver: cheap, and in any build.

use std::fs;
use std::path::Path;

/// Who made a GPU, as far as it matters for the choice of a feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Vendor {
    Nvidia,
    Amd,
    Intel,
    Apple,
}

impl Vendor {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Nvidia => "NVIDIA",
            Self::Amd => "AMD",
            Self::Intel => "Intel",
            Self::Apple => "Apple",
        }
    }

    /// Features that reach its GPUs, the best first.
    fn features(self) -> &'static [&'static str] {
        match self {
            Self::Nvidia => &["cuda", "wgpu"],
            Self::Amd => &["wgpu", "rocm"],
            Self::Intel | Self::Apple => &["wgpu"],
        }
    }
}

/// Features of this build that reach GPUs.
pub(crate) const COMPILED_IN: &[(&str, bool)] = &[
    ("cuda", cfg!(feature = "cuda")),
    ("rocm", cfg!(feature = "rocm")),
    ("wgpu", cfg!(feature = "wgpu")),
];

/// Makers of the GPUs here, each once.
pub(crate) fn vendors() -> Vec<Vendor> {
    match cfg!(target_os = "macos") {
        true => vec![Vendor::Apple],
        false => listed(Path::new("/")),
    }
}

/// Makers of the GPUs that Linux lists below `root`: NVIDIA's driver has device files of its own, all others are
/// render nodes with the maker's number on the PCI bus. Other numbers are those of virtual machines.
fn listed(root: &Path) -> Vec<Vendor> {
    let names = |folder: &str| {
        let entries = fs::read_dir(root.join(folder)).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect::<Vec<_>>()
    };
    let numbered = |name: &str, kind: &str| {
        let number = name.strip_prefix(kind);
        number.is_some_and(|n| !n.is_empty() && n.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let own = names("dev").into_iter().filter(|name| numbered(name, "nvidia"));
    let nodes = names("dev/dri").into_iter().filter(|name| numbered(name, "renderD"));
    let on_the_bus = nodes.filter_map(|node| {
        let file = root.join("sys/class/drm").join(node).join("device/vendor");
        match fs::read_to_string(file).ok()?.trim() {
            "0x10de" => Some(Vendor::Nvidia),
            "0x1002" => Some(Vendor::Amd),
            "0x8086" => Some(Vendor::Intel),
            _ => None,
        }
    });
    let mut vendors: Vec<Vendor> = own.map(|_| Vendor::Nvidia).chain(on_the_bus).collect();
    vendors.sort_unstable();
    vendors.dedup();
    vendors
}

/// The processor, as Linux names it, else by its kind; and the cores that this process may use.
pub(crate) fn processor() -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let named = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let name = named.map_or(std::env::consts::ARCH, |(_, name)| name.trim());
    format!("{name}, {cores} of its threads for this process")
}

/// The version of the system's NVIDIA driver, where Linux tells.
pub(crate) fn nvidia_driver() -> Option<String> {
    let version = fs::read_to_string("/sys/module/nvidia/version").ok()?;
    Some(version.trim().to_string())
}

/// Advice on a feature to build with, where there are GPUs and the processor was taken. The makers' order is that of
/// their speed, as a rule.
pub(crate) fn advice(vendors: &[Vendor], compiled_in: &[(&str, bool)]) -> Option<String> {
    let missing = |feature: &&&str| !compiled_in.contains(&(**feature, true));
    vendors.iter().find_map(|vendor| {
        let feature = vendor.features().iter().find(missing)?;
        let name = vendor.name();
        Some(format!("an {name} GPU is here: build with --features {feature} to use it"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A system with these files.
    fn system(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a folder");
        for (name, text) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().expect("a folder")).expect("writable");
            fs::write(path, text).expect("writable");
        }
        root
    }

    fn of(files: &[(&str, &str)]) -> Vec<Vendor> {
        listed(system(files).path())
    }

    #[test]
    fn a_gpu_is_known_by_its_files() {
        let [amd, virtual_one] = ["renderD128", "renderD129"].map(|node| format!("dev/dri/{node}"));
        let vendor = |node: &str| format!("sys/class/drm/{node}/device/vendor");
        assert_eq!(of(&[]), []);
        assert_eq!(of(&[("dev/nvidiactl", ""), ("dev/nvidia-uvm", "")]), [], "a driver, no GPU");
        assert_eq!(of(&[("dev/nvidia0", ""), ("dev/nvidia12", "")]), [Vendor::Nvidia]);
        let files = [
            (amd.as_str(), ""),
            (&vendor("renderD128"), "0x1002\n"),
            (&virtual_one, ""),
            (&vendor("renderD129"), "0x1af4\n"),
            ("dev/dri/card0", ""),
        ];
        assert_eq!(of(&files), [Vendor::Amd]);
        assert_eq!(of(&files[2..]), [], "a virtual machine's");
        let both = [&files[..], &[("dev/nvidia0", "")]].concat();
        assert_eq!(of(&both), [Vendor::Nvidia, Vendor::Amd]);
    }

    #[test]
    fn the_feature_that_is_missing_is_named() {
        let says = |vendors: &[Vendor], built: &[&str]| {
            let built: Vec<(&str, bool)> = built.iter().map(|feature| (*feature, true)).collect();
            advice(vendors, &[&built[..], &[("wgpu", false)]].concat())
        };
        let named = |text: Option<String>, feature: &str| {
            text.is_some_and(|text| text.contains(&format!("--features {feature} ")))
        };
        assert!(named(says(&[Vendor::Nvidia], &[]), "cuda"));
        assert!(named(says(&[Vendor::Nvidia], &["cuda"]), "wgpu"), "its driver does not answer");
        assert!(named(says(&[Vendor::Amd], &[]), "wgpu"));
        assert!(named(says(&[Vendor::Amd], &["wgpu"]), "rocm"));
        assert!(named(says(&[Vendor::Intel, Vendor::Apple], &[]), "wgpu"));
        assert_eq!(says(&[Vendor::Nvidia], &["cuda", "wgpu"]), None, "nothing is missing");
        assert_eq!(says(&[], &[]), None);
    }
}
