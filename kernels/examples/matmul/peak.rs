//! Products of `mma.sync` on registers alone: nothing is loaded, so nothing else is waited for.

use crate::cases::storage;
use cubecl::future::block_on;
use cubecl::ir::{FloatKind, StorageType};
use cubecl::prelude::cmma::MmaDefinition;
use cubecl::prelude::*;
use std::time::Instant;

/// Independent sums of a plane: an instruction waits for none of those before it.
const SUMS: usize = 16;
const TURNS: u32 = 20_000;
/// Planes of a cube, and cubes.
const PLANES: u32 = 8;
const CUBES: u32 = 2 * 132;

#[cube(launch_unchecked)]
fn multiply<E: Float, A: Size>(
    out: &mut Array<f32>,
    turns: u32,
    #[comptime] k: usize,
    #[define(E)] _type: StorageType,
    #[define(A)] _width: usize,
) {
    let mma = MmaDefinition::<E, E, f32>::new(16usize, 8usize, k);
    let x = E::cast_from(f32::cast_from(UNIT_POS) * 1e-3f32);
    let mut a = Array::<Vector<E, A>>::new(4usize);
    #[unroll]
    for n in 0..4usize {
        a[n] = Vector::<E, A>::new(x);
    }
    let mut b = Array::<Vector<E, A>>::new(2usize);
    b[0] = Vector::<E, A>::new(x);
    b[1] = Vector::<E, A>::new(x);
    let mut sums = Sequence::<Array<Vector<f32, Const<2>>>>::new();
    #[unroll]
    for _ in 0..SUMS {
        let mut sum = Array::<Vector<f32, Const<2>>>::new(2usize);
        sum[0] = Vector::new(0.0f32);
        sum[1] = Vector::new(0.0f32);
        sums.push(sum);
    }
    for _ in 0..turns {
        #[unroll]
        for n in 0..SUMS {
            mma.execute_inplace(&a, &b, sums.index_mut(n));
        }
    }
    let mut total = 0.0f32;
    #[unroll]
    for n in 0..SUMS {
        total += sums.index(n)[0][0];
    }
    out[ABSOLUTE_POS] = total;
}

/// TFLOP/s of bf16 and TF32.
pub fn print<R: Runtime>(client: &ComputeClient<R>) {
    println!("types,tflops");
    for (name, kind, k, width) in
        [("bf16", FloatKind::BF16, 16, 2), ("tf32", FloatKind::TF32, 8, 1)]
    {
        let units = PLANES * 32;
        let numbers = (CUBES * units) as usize;
        let out = client.empty(4 * numbers);
        let launch = || {
            // SAFETY: every unit writes one number, and there are as many.
            #[allow(unsafe_code)]
            unsafe {
                multiply::launch_unchecked::<R>(
                    client,
                    CubeCount::Static(CUBES, 1, 1),
                    CubeDim::new_1d(units),
                    ArrayArg::from_raw_parts(out.clone(), numbers),
                    TURNS,
                    k,
                    storage(kind),
                    width,
                );
            }
            block_on(client.sync()).expect("the kernel runs");
        };
        launch();
        let start = Instant::now();
        launch();
        let flops = 2.0 * (16 * 8 * k) as f64 * SUMS as f64 * f64::from(TURNS * PLANES * CUBES);
        println!("{name},{:.0}", flops / start.elapsed().as_secs_f64() / 1e12);
    }
}
