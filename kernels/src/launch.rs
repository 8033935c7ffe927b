//! Launches of kernels that the host is waited for: those of a single token.

/// Launches a kernel as its own `launch_unchecked` does, without a copy of the device's properties for each launch, which
/// is a sixth of the host's time between two launches. Arguments with a `comptime!` size in [`LaunchArg::register`] would
/// want these properties; none here has one, and compiling a kernel asks the client for them by itself.
///
/// # Safety
/// As the kernel's `launch_unchecked`.
///
/// [`LaunchArg::register`]: cubecl::prelude::LaunchArg::register
macro_rules! launch_light {
    (
        $client:expr, $cubes:expr, $dim:expr, $module:ident::$kernel:ident<$runtime:ty>,
        types: [$($scalar:ident: $dtype:expr),*], sizes: [$($size:ident: $numbers:expr),*],
        arguments: [$($argument:expr => $of:ty),* $(,)?], comptime: [$($value:expr),* $(,)?] $(,)?
    ) => {{
        let client: &ComputeClient<$runtime> = $client;
        let settings = KernelSettings::default().cube_dim($dim).address_type(AddressType::U32);
        let mut launcher = KernelLauncher::<$runtime>::new(settings.clone());
        launcher.with_scope(|scope| {
            $(scope.register_type::<$module::$scalar>($dtype);)*
            $(scope.register_size::<$module::$size>($numbers);)*
        });
        let kernel = $module::$kernel::<$runtime>::new(
            settings,
            client.clone(),
            $(<$of as LaunchArg>::register($argument, &mut launcher),)*
            $($value),*
        );
        launcher.launch_unchecked($cubes, kernel, client);
    }};
}
pub(crate) use launch_light;
