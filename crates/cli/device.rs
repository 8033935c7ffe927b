//! From a device's name to a backend that runs a job on it.

#[cfg(any(feature = "cuda", feature = "rocm"))]
use crate::driver;
use crate::gpus;
use linattn::backend::TrainBackend;
use std::fmt;

/// A job for whichever backend a device's name asks for. (A closure cannot be generic.)
pub trait Job {
    /// Its result.
    type Output;
    /// Runs it; there is at least one device.
    fn run<B: TrainBackend>(self, devices: &[B::Device]) -> Self::Output;
}

/// A device that no job can run on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("device `{device}`: {why}")]
pub struct DeviceError {
    device: String,
    why: String,
}

impl DeviceError {
    fn new(device: &str, why: impl Into<String>) -> Self {
        Self { device: device.to_string(), why: why.into() }
    }
}

/// Kinds of device, as a name begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// This computer's processor.
    Cpu,
    /// NVIDIA, through CUDA.
    Cuda,
    /// AMD, through ROCm.
    Rocm,
    /// Any GPU, through wgpu: Vulkan, or Metal on Apple's systems.
    Wgpu,
}

/// Name of wgpu's devices where this was compiled.
#[cfg(feature = "wgpu")]
const WGPU_NAME: &str = if cfg!(target_vendor = "apple") { "metal" } else { "vulkan" };

/// Devices of one kind, by their numbers, and the name to report them under.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The kind.
    pub kind: Kind,
    /// Which of them, at least one.
    pub indices: Vec<usize>,
    /// As in `summary.json`: the name asked for and what it turned out to be.
    pub name: String,
    /// Where `auto` came to the processor and a GPU is there: what to build with.
    pub advice: Option<String>,
}

impl Choice {
    fn one(kind: Kind, index: usize, name: String) -> Self {
        Self { kind, indices: vec![index], name, advice: None }
    }

    /// Says what to build with, if there is something to say.
    pub(crate) fn advise(&self) {
        if let Some(advice) = &self.advice {
            crate::output::note(&format!("note: {advice}"));
        }
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// Finds the devices that `text` names: `auto`, or kinds with numbers, `cuda:0,cuda:1`.
/// # Errors
/// [`DeviceError`] says what there is.
pub fn choose(text: &str) -> Result<Choice, DeviceError> {
    if text == "auto" {
        return automatic();
    }
    let mut chosen: Option<Choice> = None;
    for name in text.split(',').map(str::trim) {
        let (kind, index) = parse(name)?;
        let label = look_up(name, kind, index)?;
        match &mut chosen {
            None => chosen = Some(Choice::one(kind, index, label)),
            Some(choice) if choice.kind != kind => {
                return Err(DeviceError::new(text, "several devices have to be of one kind"));
            }
            Some(choice) if choice.indices.contains(&index) => {
                return Err(DeviceError::new(text, format!("{name} is named twice")));
            }
            Some(choice) => {
                choice.indices.push(index);
                choice.name = format!("{}, {label}", choice.name);
            }
        }
    }
    chosen.ok_or_else(|| DeviceError::new(text, wanted()))
}

fn wanted() -> String {
    "it has to be auto, cpu, cuda:N, rocm:N, vulkan:N or metal:N, or several of one kind with \
     commas between"
        .to_string()
}

fn parse(name: &str) -> Result<(Kind, usize), DeviceError> {
    let (kind, index) = name.split_once(':').unwrap_or((name, "0"));
    let kind = match kind {
        "cpu" => Kind::Cpu,
        "cuda" => Kind::Cuda,
        "rocm" => Kind::Rocm,
        "vulkan" | "metal" | "wgpu" => Kind::Wgpu,
        _ => return Err(DeviceError::new(name, wanted())),
    };
    match index.parse() {
        Ok(index) => Ok((kind, index)),
        Err(_) => Err(DeviceError::new(name, format!("`{index}` is no number; {}", wanted()))),
    }
}

/// The best device there is: a real GPU, else the processor. A software adapter is a GPU in name
/// only, and slower than the processor's own backend.
fn automatic() -> Result<Choice, DeviceError> {
    #[cfg(feature = "cuda")]
    if let Ok(label) = look_up("cuda:0", Kind::Cuda, 0) {
        return Ok(Choice::one(Kind::Cuda, 0, label));
    }
    #[cfg(feature = "rocm")]
    if let Ok(label) = look_up("rocm:0", Kind::Rocm, 0) {
        return Ok(Choice::one(Kind::Rocm, 0, label));
    }
    #[cfg(feature = "wgpu")]
    {
        use wgpu::DeviceType::{DiscreteGpu, IntegratedGpu, VirtualGpu};
        let adapters = adapters();
        for wanted in [DiscreteGpu, IntegratedGpu, VirtualGpu] {
            if let Some(index) = adapters.iter().position(|a| a.device_type == wanted) {
                let name = format!("{WGPU_NAME}:{index} ({})", adapters[index].name);
                return Ok(Choice::one(Kind::Wgpu, index, name));
            }
        }
    }
    let label = look_up("cpu", Kind::Cpu, 0).map_err(|_| {
        DeviceError::new("auto", "no GPU answers, and this program was built without `cpu`")
    })?;
    let advice = gpus::advice(&gpus::vendors(), gpus::COMPILED_IN);
    Ok(Choice { advice, ..Choice::one(Kind::Cpu, 0, label) })
}

/// Makes sure of one device, and gives the name to report.
fn look_up(name: &str, kind: Kind, index: usize) -> Result<String, DeviceError> {
    match kind {
        Kind::Cpu if cfg!(feature = "cpu") => match index {
            0 => Ok("cpu".to_string()),
            _ => Err(DeviceError::new(name, "there is only one: cpu")),
        },
        #[cfg(feature = "cuda")]
        Kind::Cuda => driver::CUDA
            .count()
            .and_then(|count| within(index, count, "CUDA GPUs"))
            .map(|()| format!("cuda:{index}"))
            .map_err(|why| DeviceError::new(name, why)),
        #[cfg(feature = "rocm")]
        Kind::Rocm => driver::ROCM
            .count()
            .and_then(|count| within(index, count, "ROCm GPUs"))
            .map(|()| format!("rocm:{index}"))
            .map_err(|why| DeviceError::new(name, why)),
        #[cfg(feature = "wgpu")]
        Kind::Wgpu => {
            if name.starts_with("metal") != (WGPU_NAME == "metal") && !name.starts_with("wgpu") {
                let why = format!("this system's GPUs are called {WGPU_NAME}:N");
                return Err(DeviceError::new(name, why));
            }
            let adapters = adapters();
            within(index, adapters.len(), &format!("{WGPU_NAME} adapters"))
                .map_err(|why| DeviceError::new(name, why))?;
            Ok(format!("{WGPU_NAME}:{index} ({})", adapters[index].name))
        }
        _ => {
            let feature = match kind {
                Kind::Cpu => "cpu",
                Kind::Cuda => "cuda",
                Kind::Rocm => "rocm",
                Kind::Wgpu => "wgpu",
            };
            let why = format!("not compiled in; build with --features {feature}");
            Err(DeviceError::new(name, why))
        }
    }
}

#[cfg(any(feature = "cuda", feature = "rocm", feature = "wgpu"))]
fn within(index: usize, count: usize, what: &str) -> Result<(), String> {
    match index < count {
        true => Ok(()),
        false => Err(format!("{count} {what} are there, numbered from 0")),
    }
}

/// A device that this build can use, as `doctor` lists it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Listed {
    /// As `--device` takes it.
    pub name: String,
    /// The chip, as its driver or the system names it.
    pub model: String,
    /// The driver, as far as it tells.
    pub driver: Option<String>,
    /// An adapter that is a program: slower than `cpu`.
    pub software: bool,
}

/// Devices of each feature, or why there are none.
pub(crate) fn list() -> Vec<(&'static str, Result<Vec<Listed>, String>)> {
    let missing = |feature| Err(format!("not compiled in; build with --features {feature}"));
    let mut kinds: Vec<(&str, Result<Vec<Listed>, String>)> =
        ["cpu", "cuda", "rocm", "wgpu"].map(|feature| (feature, missing(feature))).into();
    if cfg!(feature = "cpu") {
        kinds[0].1 = Ok(vec![Listed {
            name: "cpu".into(),
            model: gpus::processor(),
            driver: None,
            software: false,
        }]);
    }
    #[cfg(feature = "cuda")]
    {
        kinds[1].1 = of_driver(&driver::CUDA, "cuda");
    }
    #[cfg(feature = "rocm")]
    {
        kinds[2].1 = of_driver(&driver::ROCM, "rocm");
    }
    #[cfg(feature = "wgpu")]
    {
        let adapters = adapters().into_iter().enumerate().map(|(index, adapter)| Listed {
            name: format!("{WGPU_NAME}:{index}"),
            model: adapter.name,
            driver: Some(format!("{} {}", adapter.driver, adapter.driver_info)),
            software: adapter.device_type == wgpu::DeviceType::Cpu,
        });
        kinds[3].1 = Ok(adapters.collect());
    }
    kinds
}

#[cfg(any(feature = "cuda", feature = "rocm"))]
fn of_driver(driver: &driver::Driver, name: &str) -> Result<Vec<Listed>, String> {
    let listed = |index| {
        let model = driver.model(index)?;
        Ok(Listed {
            name: format!("{name}:{index}"),
            model: model.name,
            driver: Some(model.driver),
            software: false,
        })
    };
    (0..driver.count()?).map(listed).collect()
}

/// Starts the program again without Mesa's choice among devices where there is no display to choose by.
/// The layer asks Wayland, whose library writes two lines about a missing `XDG_RUNTIME_DIR` to standard
/// error whenever adapters are listed; and a process cannot change its own environment safely. Comes back
/// where nothing has to change.
pub fn without_display() {
    #[cfg(all(feature = "wgpu", target_os = "linux"))]
    {
        use std::os::unix::process::CommandExt;
        const LAYER_OFF: &str = "NODEVICE_SELECT";
        let known = |name: &str| std::env::var_os(name).is_some();
        if known("XDG_RUNTIME_DIR") || known(LAYER_OFF) {
            return;
        }
        let mut args = std::env::args_os();
        let name = args.next().unwrap_or_default();
        if let Ok(program) = std::env::current_exe() {
            let mut again = std::process::Command::new(program);
            // Only a failure comes back: then the lines are seen, and nothing else is lost.
            let _why = again.arg0(name).args(args).env(LAYER_OFF, "1").exec();
        }
    }
}

/// Adapters of the API that Burn's wgpu backend uses here.
#[cfg(feature = "wgpu")]
fn adapters() -> Vec<wgpu::AdapterInfo> {
    let backends = match WGPU_NAME {
        "metal" => wgpu::Backends::METAL,
        _ => wgpu::Backends::VULKAN,
    };
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor {
        backends,
        ..wgpu::InstanceDescriptor::new_without_display_handle()
    });
    let adapters = cubecl::future::block_on(instance.enumerate_adapters(backends));
    adapters.iter().map(wgpu::Adapter::get_info).collect()
}

/// Every adapter, as Burn names it.
#[cfg(feature = "wgpu")]
pub fn wgpu_devices() -> Vec<burn::backend::wgpu::WgpuDevice> {
    (0..adapters().len()).map(wgpu_device).collect()
}

/// Burn's name for the adapter at `index`: it counts each kind of adapter by itself.
#[cfg(feature = "wgpu")]
fn wgpu_device(index: usize) -> burn::backend::wgpu::WgpuDevice {
    use burn::backend::wgpu::WgpuDevice;
    let adapters = adapters();
    let kind = adapters[index].device_type;
    let place = adapters[..index].iter().filter(|a| a.device_type == kind).count();
    match kind {
        wgpu::DeviceType::DiscreteGpu => WgpuDevice::DiscreteGpu(place),
        wgpu::DeviceType::IntegratedGpu => WgpuDevice::IntegratedGpu(place),
        wgpu::DeviceType::VirtualGpu => WgpuDevice::VirtualGpu(place),
        wgpu::DeviceType::Cpu => WgpuDevice::Cpu,
        wgpu::DeviceType::Other => WgpuDevice::DefaultDevice,
    }
}

/// Threads that share a training step on the processor, whose elementwise operations use one core
/// each. Not the number of cores, so that a run's bits do not depend on it.
#[cfg(all(feature = "cpu", not(test)))]
const CPU_PARTS: usize = 4;

/// Runs a job on the devices chosen.
/// # Errors
/// [`DeviceError`] if their backend is not compiled in.
pub fn dispatch<J: Job>(choice: &Choice, job: J) -> Result<J::Output, DeviceError> {
    run_on(choice, job)
}

/// The crate's own unit tests run no job: every backend's code would be made for them a second time.
#[cfg(test)]
fn run_on<J: Job>(choice: &Choice, _job: J) -> Result<J::Output, DeviceError> {
    Err(DeviceError::new(&choice.name, "not compiled into unit tests"))
}

#[cfg(not(test))]
fn run_on<J: Job>(choice: &Choice, job: J) -> Result<J::Output, DeviceError> {
    #[allow(unused_imports)]
    use burn::backend::Autodiff;
    match choice.kind {
        #[cfg(feature = "cpu")]
        Kind::Cpu => Ok(job.run::<Autodiff<burn::backend::Flex>>(&[Default::default(); CPU_PARTS])),
        #[cfg(feature = "wgpu")]
        Kind::Wgpu => {
            let devices: Vec<_> = choice.indices.iter().map(|&i| wgpu_device(i)).collect();
            Ok(job.run::<Autodiff<burn::backend::Wgpu>>(&devices))
        }
        #[cfg(feature = "cuda")]
        Kind::Cuda => {
            driver::keep_compiled(&driver::CUDA, &choice.indices);
            let device = burn::backend::cuda::CudaDevice::new;
            let devices: Vec<_> = choice.indices.iter().map(|&i| device(i)).collect();
            Ok(job.run::<Autodiff<burn::backend::Cuda>>(&devices))
        }
        #[cfg(feature = "rocm")]
        Kind::Rocm => {
            driver::keep_compiled(&driver::ROCM, &choice.indices);
            let device = burn::backend::rocm::RocmDevice::new;
            let devices: Vec<_> = choice.indices.iter().map(|&i| device(i)).collect();
            Ok(job.run::<Autodiff<burn::backend::Rocm>>(&devices))
        }
        #[allow(unreachable_patterns)]
        _ => Err(DeviceError::new(&choice.name, "not compiled in")),
    }
}
