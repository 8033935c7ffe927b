//! Launches of kernels that the host is waited for: those of a single token.

/// Launches a kernel as its own `launch_unchecked` does (cubecl-macros 0.10.0), without a copy of the device's properties
/// for each launch, which is a sixth of the host's time between two. Of all arguments `FastDivmod` alone reads them there:
/// none here may contain one. A kernel that is compiled asks the client for them by itself.
///
/// Types, sizes, arguments and compile-time values stand in the order of the kernel's signature.
///
/// # Safety
/// As the kernel's `launch_unchecked`.
macro_rules! launch_light {
    (
        $client:expr, $cubes:expr, $dim:expr, $module:ident::$kernel:ident<$runtime:ty>,
        types: [$($scalar:ident: $dtype:expr),*], sizes: [$($size:ident: $numbers:expr),*],
        arguments: [$($name:ident: $of:ty = $argument:expr),* $(,)?],
        comptime: [$($value:expr),* $(,)?] $(,)?
    ) => {{
        let client: &ComputeClient<$runtime> = $client;
        // All of them before the first is registered: one that launches, or panics, would leave the others to the next.
        $(let $name = $argument;)*
        let settings = KernelSettings::default().cube_dim($dim).address_type(AddressType::U32);
        let mut launcher = KernelLauncher::<$runtime>::new(settings.clone());
        launcher.with_scope(|scope| {
            $(scope.register_type::<$module::$scalar>($dtype);)*
            $(scope.register_size::<$module::$size>($numbers);)*
        });
        let kernel = $module::$kernel::<$runtime>::new(
            settings,
            client.clone(),
            $(<$of as LaunchArg>::register($name, &mut launcher),)*
            $($value),*
        );
        launcher.launch_unchecked($cubes, kernel, client);
    }};
}
pub(crate) use launch_light;
