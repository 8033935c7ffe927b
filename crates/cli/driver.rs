//! GPUs as the drivers of NVIDIA and AMD report them, and the folder of kernels compiled for them.

use cubecl::config::cache::CacheConfig;
use cubecl::config::{CubeClRuntimeConfig, RuntimeConfig};
use libloading::Library;
use std::ffi::{CStr, c_char};
use std::path::{Path, PathBuf};
use std::sync::Arc;

type Init = unsafe extern "C" fn(u32) -> i32;
type Number = unsafe extern "C" fn(*mut i32) -> i32;
type Device = unsafe extern "C" fn(*mut i32, i32) -> i32;
type Name = unsafe extern "C" fn(*mut c_char, i32, i32) -> i32;

/// A vendor's driver: its library, which is loaded when it is asked, and the functions asked.
pub(crate) struct Driver {
    what: &'static str,
    libraries: &'static [&'static str],
    init: &'static str,
    count: &'static str,
    device: &'static str,
    name: &'static str,
    version: &'static str,
    /// For people.
    readable: fn(i32) -> String,
}

/// A GPU as its driver tells of it.
pub(crate) struct Model {
    pub(crate) name: String,
    version: i32,
    /// The newest CUDA or HIP that the driver knows.
    pub(crate) driver: String,
}

impl Model {
    /// The name of a folder for it. What was compiled for one GPU and driver need not run on another.
    fn folder(&self) -> String {
        let name = self.name.replace(|c: char| !c.is_ascii_alphanumeric(), "_");
        format!("{name}-{}", self.version)
    }
}

#[cfg(feature = "cuda")]
pub(crate) const CUDA: Driver = Driver {
    what: "CUDA",
    libraries: &["libcuda.so.1", "nvcuda.dll"],
    init: "cuInit",
    count: "cuDeviceGetCount",
    device: "cuDeviceGet",
    name: "cuDeviceGetName",
    version: "cuDriverGetVersion",
    readable: |version| format!("CUDA {}.{}", version / 1000, version % 1000 / 10),
};

#[cfg(feature = "rocm")]
pub(crate) const ROCM: Driver = Driver {
    what: "ROCm",
    libraries: &["libamdhip64.so", "libamdhip64.so.6"],
    init: "hipInit",
    count: "hipGetDeviceCount",
    device: "hipDeviceGet",
    name: "hipDeviceGetName",
    version: "hipDriverGetVersion",
    readable: |version| format!("HIP {}.{}", version / 10_000_000, version / 100_000 % 100),
};

#[allow(unsafe_code)] // a library that is only there with a driver can only be asked this way
impl Driver {
    fn library(&self) -> Result<Library, String> {
        // SAFETY: the driver libraries have no constructors that need anything of us.
        let load = |name: &&str| unsafe { Library::new(name) }.ok();
        let library = self.libraries.iter().find_map(load);
        library.ok_or_else(|| format!("no {} driver is installed here", self.what))
    }

    fn missing(&self, error: libloading::Error) -> String {
        format!("the {} driver is incomplete: {error}", self.what)
    }

    fn check(&self, codes: &[i32]) -> Result<(), String> {
        match codes.iter().all(|code| *code == 0) {
            true => Ok(()),
            false => {
                Err(format!("the {} driver answers with the error codes {codes:?}", self.what))
            }
        }
    }

    /// Counts GPUs; nothing is started on them.
    pub(crate) fn count(&self) -> Result<usize, String> {
        let library = self.library()?;
        let mut found = 0;
        // SAFETY: both functions have had these signatures in every release of CUDA and HIP; the
        // pointer is to a live i32.
        let codes = unsafe {
            let init = library.get::<Init>(self.init.as_bytes()).map_err(|e| self.missing(e))?;
            let count =
                library.get::<Number>(self.count.as_bytes()).map_err(|e| self.missing(e))?;
            [init(0), count(&mut found)]
        };
        self.check(&codes)?;
        Ok(usize::try_from(found).unwrap_or(0))
    }

    /// A GPU's model, and the driver's version.
    pub(crate) fn model(&self, index: usize) -> Result<Model, String> {
        let library = self.library()?;
        let index = i32::try_from(index).map_err(|e| e.to_string())?;
        let (mut device, mut version, mut name) = (0, 0, [0_u8; 256]);
        // SAFETY: as in `count`; the name's buffer is as long as the driver is told.
        let codes = unsafe {
            let init = library.get::<Init>(self.init.as_bytes()).map_err(|e| self.missing(e))?;
            let get = library.get::<Device>(self.device.as_bytes()).map_err(|e| self.missing(e))?;
            let named = library.get::<Name>(self.name.as_bytes()).map_err(|e| self.missing(e))?;
            let versioned =
                library.get::<Number>(self.version.as_bytes()).map_err(|e| self.missing(e))?;
            [
                init(0),
                get(&mut device, index),
                named(name.as_mut_ptr().cast(), 256, device),
                versioned(&mut version),
            ]
        };
        self.check(&codes)?;
        let name = CStr::from_bytes_until_nul(&name).map_err(|e| e.to_string())?;
        let name = name.to_string_lossy().into_owned();
        Ok(Model { name, version, driver: (self.readable)(version) })
    }
}

/// Has kernels that are compiled for these GPUs kept on disk. CubeCL finds a kept kernel by its name
/// and compile-time values, whatever its code and the GPU, so the folder is this source's, this
/// model's and this driver's own. A `cubecl.toml` that says where to keep them goes first. This has to
/// come before anything else asks for a GPU.
#[cfg_attr(test, allow(dead_code))] // unit tests run no job
pub(crate) fn keep_compiled(driver: &Driver, indices: &[usize]) {
    let mut slot = CubeClRuntimeConfig::storage().lock();
    if slot.is_some() {
        return;
    }
    let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
    if config.compilation.cache.is_none() {
        match caches().and_then(|caches| folder(&caches, &model(driver, indices)?)) {
            Ok(folder) => config.compilation.cache = Some(CacheConfig::File(folder)),
            Err(why) => {
                crate::output::note(&format!("warning: compiled kernels are not kept: {why}"));
            }
        }
    }
    *slot = Some(Arc::new(config));
}

/// The model of all of them.
fn model(driver: &Driver, indices: &[usize]) -> Result<String, String> {
    let model = |&index| driver.model(index).map(|model| model.folder());
    let models: Result<Vec<_>, _> = indices.iter().map(model).collect();
    let mut models = models?;
    models.dedup();
    match models.as_slice() {
        [model] => Ok(model.clone()),
        _ => Err(format!("the GPUs are of several models: {}", models.join(", "))),
    }
}

/// Where the user's programs keep what they can make again.
fn caches() -> Result<PathBuf, String> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    variable("XDG_CACHE_HOME")
        .or_else(|| variable("HOME").map(|home| home.join(".cache")))
        .ok_or_else(|| "neither XDG_CACHE_HOME nor HOME names a folder".to_string())
}

/// Makes the folder, and makes sure that files can be made in it: CubeCL panics where they cannot.
fn folder(caches: &Path, model: &str) -> Result<PathBuf, String> {
    let folder = caches.join("linattn/kernels").join(linattn_kernels::source_hash()).join(model);
    std::fs::create_dir_all(&folder)
        .and_then(|()| std::fs::write(folder.join("writable"), ""))
        .map_err(|e| format!("{}: {e}", folder.display()))?;
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::folder;

    #[test]
    fn each_source_and_model_has_a_folder_of_its_own() {
        let caches = tempfile::tempdir().expect("a folder");
        let [a, b] = ["a", "b"].map(|model| folder(caches.path(), model).expect("it is made"));
        assert!(a.is_dir() && b.is_dir() && a != b);
        assert!(a.parent().is_some_and(|p| p.ends_with(linattn_kernels::source_hash())));
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_named() {
        let caches = tempfile::tempdir().expect("a folder");
        std::fs::write(caches.path().join("linattn"), "").expect("a file in the way");
        let why = folder(caches.path(), "a").expect_err("no folder");
        assert!(why.contains(&*caches.path().to_string_lossy()), "{why}");
    }
}
