//! Tools of tests of fused layers: rows on a device in each type, and activations in f64.

use crate::buffer::Buffer;
use crate::pointwise::Activation;
use crate::tests::Rows;
use cubecl::ir::StorageType;
use cubecl::ir::features::TypeUsage;
use cubecl::prelude::*;
use cubecl::server::Handle;
use linattn_oracle::Rng;

/// A device, and a type of rows.
pub(crate) struct Sandbox<'a, R: Runtime> {
    pub(crate) client: &'a ComputeClient<R>,
    pub(crate) rows: Rows,
}

impl<R: Runtime> Sandbox<'_, R> {
    pub(crate) fn put(&self, values: &[f64], rows: Rows) -> Handle {
        self.client.create_from_slice(&rows.bytes(values))
    }

    pub(crate) fn get(&self, buffer: &Buffer) -> Vec<f64> {
        let bytes = self.client.read_one(buffer.handle.clone()).expect("the kernel ran");
        let mut numbers = kind(buffer.dtype).numbers(&bytes);
        assert!(numbers.len() >= buffer.len());
        numbers.truncate(buffer.len());
        numbers
    }

    /// Numbers from N(0, 1), as `rows` hold them.
    pub(crate) fn draw(&self, name: &str, numbers: usize, rows: Rows) -> Vec<f64> {
        let mut rng = Rng::named(11, name);
        let mut values = (0..numbers).map(|_| rng.normal()).collect::<Vec<_>>();
        rows.round(&mut values);
        values
    }
}

fn kind(dtype: StorageType) -> Rows {
    let all = [Rows::F32, Rows::F16, Rows::Bf16];
    all.into_iter().find(|rows| rows.dtype() == dtype).expect("a type of rows")
}

/// `test` in every type that the device has.
pub(crate) fn everywhere<R: Runtime>(client: &ComputeClient<R>, test: impl Fn(&Sandbox<'_, R>)) {
    for rows in [Rows::F32, Rows::F16, Rows::Bf16] {
        let usage = client.properties().type_usage(rows.dtype());
        if usage.contains(TypeUsage::Conversion) {
            test(&Sandbox { client, rows });
        } else {
            assert_ne!(rows, Rows::F32, "every device has f32");
        }
    }
}

pub(crate) fn sigmoid(z: f64) -> f64 {
    1.0 / (1.0 + (-z).exp())
}

pub(crate) fn activated(z: f64, activation: Activation) -> f64 {
    match activation {
        Activation::Identity => z,
        Activation::Silu => z * sigmoid(z),
        Activation::Sigmoid => sigmoid(z),
    }
}

/// The derivative of [`activated`].
pub(crate) fn slope(z: f64, activation: Activation) -> f64 {
    difference(z, |z| activated(z, activation))
}

/// The derivative of `f` at `z`, as a central difference with an error of 1e-12 or so.
pub(crate) fn difference(z: f64, f: impl Fn(f64) -> f64) -> f64 {
    const STEP: f64 = 1e-3;
    let f = |n: f64| f(z + n * STEP);
    (8.0 * (f(1.0) - f(-1.0)) - (f(2.0) - f(-2.0))) / (12.0 * STEP)
}
