//! Which columns of a product the planes of a cube have.

use super::super::{Engine, Grid, column};
use crate::tests::on_wgpu::with_client;
use cubecl::prelude::*;
use std::collections::BTreeSet;

#[cube(launch_unchecked)]
fn columns(out: &mut Array<u32>, #[comptime] grid: Grid) {
    let fragments = comptime!(grid.fragments());
    #[unroll]
    for f in 0..fragments {
        out[UNIT_POS as usize * fragments + f] = column(f, grid) as u32;
    }
}

/// First columns of the pairs of each unit.
fn found<R: Runtime>(client: &ComputeClient<R>, grid: Grid) -> Vec<u32> {
    let numbers = grid.units * grid.fragments();
    let out = client.empty(4 * numbers);
    // SAFETY: there are as many numbers as units have fragments.
    #[allow(unsafe_code)]
    unsafe {
        columns::launch_unchecked::<R>(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(grid.units as u32),
            ArrayArg::from_raw_parts(out.clone(), numbers),
            grid,
        );
    }
    let bytes = client.read_one(out).expect("the kernel ran");
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

#[test]
fn planes_without_a_part_of_a_product_have_columns_of_others() {
    with_client(|client| {
        for [m, n, units] in [[32, 32, 256], [48, 32, 256], [64, 48, 256], [64, 64, 256]] {
            let grid = Grid { engine: Engine::Tf32, rounded: false, m, n, units, first: 0 };
            let planes = grid.down() * grid.across();
            let all = found(client, grid);
            let (inside, others) = all.split_at(32 * planes * grid.fragments());
            let pairs: BTreeSet<u32> = (0..n as u32).step_by(2).collect();
            assert_eq!(BTreeSet::from_iter(inside.iter().copied()), pairs, "{grid:?}");
            assert!(others.iter().all(|column| pairs.contains(column)), "{grid:?}");
        }
    });
}
