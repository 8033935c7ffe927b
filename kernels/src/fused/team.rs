//! Sums and maxima over a team: units of a cube that share a row.

use crate::pointwise::UNITS;
use cubecl::ir::features::Plane;
use cubecl::prelude::*;

/// Units of a plane, where numbers go through shuffles.
pub(super) const PLANE: usize = 32;

/// Compile-time values of a team.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Team {
    /// How many units share a row, a power of two.
    pub(crate) units: usize,
    /// Numbers go through plane shuffles.
    pub(crate) planes: bool,
}

impl Team {
    /// Of so many units, with shuffles where planes of the device have 32 units.
    pub(crate) fn of<R: Runtime>(client: &ComputeClient<R>, units: usize) -> Self {
        let properties = client.properties();
        let hardware = &properties.hardware;
        let sizes = [hardware.plane_size_min, hardware.plane_size_max];
        let planes = sizes == [PLANE as u32; 2] && properties.features.plane.contains(Plane::Ops);
        Self { units, planes }
    }

    /// Teams of a cube.
    pub(super) fn in_a_cube(&self) -> usize {
        UNITS / self.units
    }

    /// Shared memory, in numbers, for `count` numbers of each unit.
    pub(super) fn scratch(&self, count: usize) -> usize {
        count * if self.planes { UNITS / PLANE } else { UNITS }
    }
}

#[cube]
fn joined(a: f32, b: f32, #[comptime] largest: bool) -> f32 {
    if comptime!(largest) { max(a, b) } else { a + b }
}

/// The first `count` numbers of every unit become their sums over its team, or the `largest` of them, by way of
/// [`Team::scratch`] numbers. Every unit of the cube has to come here.
#[cube]
pub(crate) fn over_team(
    values: &mut Array<f32>,
    scratch: &mut SharedMemory<f32>,
    #[comptime] count: usize,
    #[comptime] largest: bool,
    #[comptime] team: Team,
) {
    if comptime!(team.planes) {
        #[unroll]
        for level in 0..comptime!(team.units.min(PLANE).ilog2()) {
            #[unroll]
            for n in 0..count {
                let mask = comptime!(1u32 << level);
                let other = plane_shuffle_xor(values[n], mask);
                values[n] = joined(values[n], other, largest);
            }
        }
        if comptime!(team.units > PLANE) {
            over_planes(values, scratch, count, largest, team);
        }
    } else if comptime!(team.units > 1) {
        over_units(values, scratch, count, largest, team);
    }
}

/// As [`over_team`], where every unit of a plane has the plane's number.
#[cube]
fn over_planes(
    values: &mut Array<f32>,
    scratch: &mut SharedMemory<f32>,
    #[comptime] count: usize,
    #[comptime] largest: bool,
    #[comptime] team: Team,
) {
    let planes = comptime!(UNITS / PLANE);
    let unit = UNIT_POS as usize;
    #[unroll]
    for n in 0..count {
        if unit.is_multiple_of(PLANE) {
            scratch[comptime!(n * planes) + unit / PLANE] = values[n];
        }
    }
    sync_cube();
    let first = unit / comptime!(team.units) * comptime!(team.units / PLANE);
    #[unroll]
    for n in 0..count {
        let mut all = scratch[first + comptime!(n * planes)];
        #[unroll]
        for plane in 1..comptime!(team.units / PLANE) {
            all = joined(all, scratch[first + comptime!(n * planes + plane)], largest);
        }
        values[n] = all;
    }
    // The next numbers go to the same places.
    sync_cube();
}

/// As [`over_team`], in shared memory alone, halving.
#[cube]
fn over_units(
    values: &mut Array<f32>,
    scratch: &mut SharedMemory<f32>,
    #[comptime] count: usize,
    #[comptime] largest: bool,
    #[comptime] team: Team,
) {
    let unit = UNIT_POS as usize;
    let own = unit % comptime!(team.units);
    #[unroll]
    for n in 0..count {
        scratch[unit + comptime!(n * UNITS)] = values[n];
    }
    sync_cube();
    #[unroll]
    for level in 0..comptime!(team.units.ilog2()) {
        let half = comptime!(team.units >> (level + 1));
        if own < half {
            #[unroll]
            for n in 0..count {
                let at = unit + comptime!(n * UNITS);
                scratch[at] = joined(scratch[at], scratch[at + half], largest);
            }
        }
        sync_cube();
    }
    #[unroll]
    for n in 0..count {
        values[n] = scratch[unit - own + comptime!(n * UNITS)];
    }
    sync_cube();
}
