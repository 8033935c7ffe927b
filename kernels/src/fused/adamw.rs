//! AdamW over many tensors in few launches, and the global gradient norm.
//! ```text
//! g' = g min(1, longest / (norm + 1e-6))                          where there is a clip
//! m' = beta_1 m + (1 - beta_1) g'
//! v' = beta_2 v + (1 - beta_2) g'^2
//! p' = p (1 - lr decay) - lr (m' / (1 - beta_1^t)) / (sqrt(v' / (1 - beta_2^t)) + epsilon)
//!
//! norm = sqrt(sum of all g^2)
//!
//! Work:   step: a unit a vector of 4 numbers, cubes of all tensors of a launch side by side.
//!         norm: partial sums of all tensors, then one cube that adds them.
//! Cost:   step reads 4 tensors and writes 3, once. Launches: one for each 24 tensors (as many as the
//!         device's bindings allow) whose lengths are multiples of 4, and as many for the others; norm
//!         one more.
//! Order:  the partial sums of a tensor depend on its length alone: the same inputs give the same bits.
//! Edges:  a norm of NaN makes every parameter NaN. Kernels are compiled once for each number of
//!         tensors; lengths are run-time values.
//! Source: AdamW, arXiv 1711.05101, as Burn has it: decoupled decay, epsilon outside the root.
//! ```

use super::embedding::{check_numbers, grid, vector_width};
use crate::buffer::{Buffer, array, buffer, buffers, whole};
use crate::pointwise::UNITS;
use crate::refusal::{F32, Refusal, check_type};
use cubecl::ir::StorageType;
use cubecl::prelude::*;
use cubecl::server::Handle;

/// Most tensors of a launch. Each is a branch of the compiled code.
const MOST: usize = 24;
/// Bindings of a tensor in a step: four inputs and three outputs.
const BINDINGS: usize = 7;
/// Numbers of a vector, where lengths are multiples of it.
const WIDTH: usize = 4;
/// Vectors that a unit requests at once in a sum.
const AHEAD: usize = 4;
/// Vectors that a unit adds before another cube is worth having, and most cubes of a tensor.
const DEEP: usize = 8;
const MOST_CUBES: usize = 1024;
/// Numbers that one cube adds in less time than a launch takes.
const SHORT: usize = 8192;

/// One tensor of a step.
#[derive(Debug, Clone, Copy)]
pub struct Tensors<'a> {
    /// The parameter.
    pub param: &'a Handle,
    /// Its gradient.
    pub gradient: &'a Handle,
    /// The first moment, f32; zeros before the first step.
    pub m: &'a Handle,
    /// The second moment, f32; zeros before the first step.
    pub v: &'a Handle,
    /// Numbers of each.
    pub len: usize,
    /// The weight decay of this tensor.
    pub decay: f32,
}

/// Numbers that all tensors of a step share.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Hyper {
    /// The learning rate.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub beta_1: f32,
    /// Decay of the second moment.
    pub beta_2: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// `1 - beta_1^t` at step t, from 1.
    pub correction_1: f32,
    /// `1 - beta_2^t`.
    pub correction_2: f32,
}

/// A limit on the global gradient norm.
#[derive(Debug, Clone, Copy)]
pub struct Clip<'a> {
    /// The norm, `[1]`, f32.
    pub norm: &'a Handle,
    /// The longest that a gradient may be.
    pub longest: f32,
}

/// Types of a step's tensors; moments are f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Types {
    /// Of parameters.
    pub param: StorageType,
    /// Of gradients.
    pub gradient: StorageType,
}

/// One tensor after a step, each `[len]`.
#[derive(Debug, Clone)]
pub struct Updated {
    /// The parameter.
    pub param: Buffer,
    /// The first moment, f32.
    pub m: Buffer,
    /// The second moment, f32.
    pub v: Buffer,
}

/// Compile-time values of a kernel over several tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    source: &'static str,
    /// Tensors of the launch.
    count: usize,
    /// Numbers of a vector.
    width: usize,
    /// In a step, whether gradients are clipped; in a sum, whether numbers are squared.
    special: bool,
}

/// Groups of tensors: lists of places in `widths` whose numbers are equal, at most `most` and
/// nearly equally many in each.
fn launches(widths: &[usize], most: usize) -> Vec<(usize, Vec<usize>)> {
    let mut all = vec![];
    for width in [WIDTH, 1] {
        let places: Vec<usize> = (0..widths.len()).filter(|n| widths[*n] == width).collect();
        let parts = places.len().div_ceil(most);
        if parts > 0 {
            let part = places.len().div_ceil(parts);
            all.extend(places.chunks(part).map(|part| (width, part.to_vec())));
        }
    }
    all
}

/// How many tensors of so many bindings a launch takes besides `others`.
fn most_tensors<R: Runtime>(
    client: &ComputeClient<R>,
    bindings: usize,
    others: usize,
) -> Result<usize, Refusal> {
    let most = client.properties().hardware.max_bindings as usize;
    // One buffer of sizes goes with every launch.
    match (most.saturating_sub(others + 1) / bindings).min(MOST) {
        0 => {
            Err(Refusal::TooLarge { what: "buffers of a kernel", got: bindings + others + 1, most })
        }
        tensors => Ok(tensors),
    }
}

/// [`WIDTH`] where the length and all handles allow it, else 1.
fn width_of<R: Runtime>(
    client: &ComputeClient<R>,
    len: usize,
    tensors: &[(&Handle, StorageType)],
) -> usize {
    if vector_width(client, len, tensors) >= WIDTH { WIDTH } else { 1 }
}

/// One AdamW step of all tensors, into new buffers.
///
/// # Errors
/// [`Refusal`] names what the kernel cannot take; then nothing was launched.
pub fn step<R: Runtime>(
    client: &ComputeClient<R>,
    tensors: &[Tensors<'_>],
    hyper: Hyper,
    clip: Option<Clip<'_>>,
    types: Types,
) -> Result<Vec<Updated>, Refusal> {
    check_type(client, types.param)?;
    check_type(client, types.gradient)?;
    let most = most_tensors(client, BINDINGS, 1)?;
    let mut widths = vec![];
    for x in tensors {
        check_numbers(x.len, 1)?;
        let given = [(x.param, types.param), (x.gradient, types.gradient), (x.m, F32), (x.v, F32)];
        widths.push(width_of(client, x.len, &given));
    }
    let mut parts = vec![];
    for (width, places) in launches(&widths, most) {
        let cubes = places.iter().map(|n| (tensors[*n].len / width).div_ceil(UNITS)).sum();
        parts.push(Part { width, places, cubes: grid(client, cubes)? });
    }
    let wanted = |x: &Tensors<'_>| [(x.len, types.param), (x.len, F32), (x.len, F32)];
    let wanted: Vec<_> = tensors.iter().flat_map(wanted).collect();
    let mut made = buffers(client, &wanted).into_iter();
    let mut next = || made.next().expect("as many as were wanted");
    let updated: Vec<Updated> =
        tensors.iter().map(|_| Updated { param: next(), m: next(), v: next() }).collect();
    for part in parts {
        let tensors: Vec<_> = part.places.iter().map(|n| (tensors[*n], &updated[*n])).collect();
        step_part(client, part, &tensors, hyper, clip, types);
    }
    Ok(updated)
}

/// One launch of [`step`] over tensors whose numbers make vectors of one width.
struct Part {
    width: usize,
    /// Places of the tensors.
    places: Vec<usize>,
    cubes: CubeCount,
}

fn step_part<R: Runtime>(
    client: &ComputeClient<R>,
    part: Part,
    tensors: &[(Tensors<'_>, &Updated)],
    hyper: Hyper,
    clip: Option<Clip<'_>>,
    types: Types,
) {
    let Part { width, cubes, .. } = part;
    let mut given = SequenceArg::new();
    let mut next = SequenceArg::new();
    let mut first = 0;
    for (x, updated) in tensors {
        let vectors = (x.len / width) as u32;
        given.push(GivenLaunch::new(
            array(x.param, x.len),
            array(x.gradient, x.len),
            array(x.m, x.len),
            array(x.v, x.len),
            (1.0 - hyper.learning_rate * f64::from(x.decay)) as f32,
            first,
            vectors,
        ));
        next.push(NextLaunch::new(whole(&updated.param), whole(&updated.m), whole(&updated.v)));
        first += vectors.div_ceil(UNITS as u32);
    }
    let form = Form { source: crate::SOURCE, count: tensors.len(), width, special: clip.is_some() };
    // A norm that is not there: any f32 tensor would do, and none is read.
    let norm = clip.map_or(tensors[0].0.m, |clip| clip.norm);
    // SAFETY: units past the last vector of a tensor do nothing; the caller promises the lengths.
    #[allow(unsafe_code)]
    unsafe {
        update_tensors::launch_unchecked::<R>(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            given,
            next,
            array(norm, 1),
            rates(hyper, clip),
            form,
            [types.param, types.gradient],
            width,
        );
    }
}

/// Numbers of a launch, each computed once.
fn rates<R: Runtime>(hyper: Hyper, clip: Option<Clip<'_>>) -> RatesLaunch<R> {
    RatesLaunch::new(
        hyper.learning_rate as f32,
        hyper.beta_1,
        hyper.beta_2,
        1.0 - hyper.beta_1,
        1.0 - hyper.beta_2,
        hyper.epsilon,
        hyper.correction_1,
        hyper.correction_2,
        clip.map_or(0.0, |clip| clip.longest),
    )
}

/// Inputs of one tensor.
#[derive(CubeType, CubeLaunch)]
struct Given<P: Float, G: Float, N: Size> {
    param: Array<Vector<P, N>>,
    gradient: Array<Vector<G, N>>,
    m: Array<Vector<f32, N>>,
    v: Array<Vector<f32, N>>,
    /// `1 - lr decay`.
    keep: f32,
    /// The first cube.
    first: u32,
    vectors: u32,
}

/// Outputs of one tensor.
#[derive(CubeType, CubeLaunch)]
struct Next<P: Float, N: Size> {
    param: Array<Vector<P, N>>,
    m: Array<Vector<f32, N>>,
    v: Array<Vector<f32, N>>,
}

/// [`Hyper`] and [`Clip::longest`].
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Rates {
    learning_rate: f32,
    beta_1: f32,
    beta_2: f32,
    /// `1 - beta_1`.
    rest_1: f32,
    rest_2: f32,
    epsilon: f32,
    correction_1: f32,
    correction_2: f32,
    longest: f32,
}

/// The kernel of [`step`].
#[cube(launch_unchecked)]
fn update_tensors<P: Float, G: Float, N: Size>(
    given: &Sequence<Given<P, G, N>>,
    next: &mut Sequence<Next<P, N>>,
    norm: &Array<f32>,
    rates: Rates,
    #[comptime] form: Form,
    #[define(P, G)] _types: [StorageType; 2],
    #[define(N)] _width: usize,
) {
    let mut factor = 1.0f32;
    if comptime!(form.special) {
        let ratio = rates.longest / (norm[0] + 1e-6f32);
        // NaN stays NaN.
        factor = select(ratio >= 1.0f32, 1.0f32, ratio);
    }
    #[unroll]
    for n in 0..comptime!(form.count) {
        let first = given.index(n).first as usize;
        let vectors = given.index(n).vectors as usize;
        if CUBE_POS >= first {
            let at = (CUBE_POS - first) * UNITS + UNIT_POS as usize;
            if at < vectors {
                update::<P, G, N>(given.index(n), next.index_mut(n), rates, factor, at);
            }
        }
    }
}

/// Updates one vector of a tensor.
#[cube]
fn update<P: Float, G: Float, N: Size>(
    given: &Given<P, G, N>,
    next: &mut Next<P, N>,
    rates: Rates,
    factor: f32,
    at: usize,
) {
    let gradient = Vector::<f32, N>::cast_from(given.gradient[at]) * Vector::new(factor);
    let m = given.m[at] * Vector::new(rates.beta_1) + gradient * Vector::new(rates.rest_1);
    let v =
        given.v[at] * Vector::new(rates.beta_2) + gradient * gradient * Vector::new(rates.rest_2);
    let root = Vector::sqrt(v / Vector::new(rates.correction_2)) + Vector::new(rates.epsilon);
    let change = m / Vector::new(rates.correction_1) / root;
    let kept = Vector::<f32, N>::cast_from(given.param[at]) * Vector::new(given.keep);
    next.param[at] = Vector::<P, N>::cast_from(kept - change * Vector::new(rates.learning_rate));
    next.m[at] = m;
    next.v[at] = v;
}

/// The global gradient norm, `[1]`, f32: the root of the sum of all g^2.
///
/// # Errors
/// [`Refusal`] names what the kernels cannot take; then nothing was launched.
pub fn norm<R: Runtime>(
    client: &ComputeClient<R>,
    gradients: &[(&Handle, usize)],
    dtype: StorageType,
) -> Result<Buffer, Refusal> {
    check_type(client, dtype)?;
    let partials = partial_sums(client, gradients, dtype, true)?;
    sum(client, &partials.handle, partials.len(), true)
}

/// The sum of `len` numbers, `[1]`, f32.
pub(crate) fn total<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Handle,
    len: usize,
) -> Result<Buffer, Refusal> {
    check_numbers(len, 1)?;
    sum(client, x, len, false)
}

/// Adds `len` f32 numbers up, in one launch or two. `root`: and takes the root.
fn sum<R: Runtime>(
    client: &ComputeClient<R>,
    x: &Handle,
    len: usize,
    root: bool,
) -> Result<Buffer, Refusal> {
    if len > SHORT {
        let partials = partial_sums(client, &[(x, len)], F32, false)?;
        return Ok(finish(client, &partials.handle, partials.len(), root));
    }
    Ok(finish(client, x, len, root))
}

/// One cube's sum of `len` numbers. `root`: its root.
fn finish<R: Runtime>(client: &ComputeClient<R>, x: &Handle, len: usize, root: bool) -> Buffer {
    let out = buffer(client, &[1], F32);
    let form = Form { source: crate::SOURCE, count: 1, width: 1, special: root };
    // SAFETY: numbers past the last one repeat it and are not added.
    #[allow(unsafe_code)]
    unsafe {
        finish_sum::launch_unchecked::<R>(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(UNITS as u32),
            array(x, len),
            whole(&out),
            len as u32,
            form,
        );
    }
    out
}

/// Cubes that add up a tensor of so many vectors: by its length alone.
fn sum_cubes(vectors: usize) -> usize {
    vectors.div_ceil(UNITS * DEEP).clamp(1, MOST_CUBES)
}

/// Sums of parts of all tensors, or (`squared`) of x^2.
fn partial_sums<R: Runtime>(
    client: &ComputeClient<R>,
    tensors: &[(&Handle, usize)],
    dtype: StorageType,
    squared: bool,
) -> Result<Buffer, Refusal> {
    let most = most_tensors(client, 1, 1)?;
    let mut widths = vec![];
    for (x, len) in tensors {
        check_numbers(*len, 1)?;
        widths.push(width_of(client, *len, &[(x, dtype)]));
    }
    let cubes_of = |width: usize, n: &usize| sum_cubes(tensors[*n].1 / width);
    let mut parts = vec![];
    let mut all = 0;
    for (width, part) in launches(&widths, most) {
        let cubes: usize = part.iter().map(|n| cubes_of(width, n)).sum();
        parts.push((width, part, grid(client, cubes)?, all));
        all += cubes;
    }
    check_numbers(all, 1)?;
    let partials = buffer(client, &[all], F32);
    for (width, part, cubes, start) in parts {
        let mut args = SequenceArg::new();
        let mut first = 0;
        for n in &part {
            let (x, len) = tensors[*n];
            let cubes = cubes_of(width, n) as u32;
            args.push(SummandLaunch::new(array(x, len), first, cubes, (len / width) as u32));
            first += cubes;
        }
        let form = Form { source: crate::SOURCE, count: part.len(), width, special: squared };
        // SAFETY: vectors past the last one repeat it and are not added; cubes of no tensor write
        // nothing.
        #[allow(unsafe_code)]
        unsafe {
            sum_parts::launch_unchecked::<R>(
                client,
                cubes,
                CubeDim::new_1d(UNITS as u32),
                args,
                whole(&partials),
                CubesLaunch::new(start as u32, first),
                form,
                dtype,
                width,
            );
        }
    }
    Ok(partials)
}

/// One tensor to add up.
#[derive(CubeType, CubeLaunch)]
struct Summand<G: Float, N: Size> {
    x: Array<Vector<G, N>>,
    /// The first cube, and how many there are.
    first: u32,
    cubes: u32,
    vectors: u32,
}

/// Cubes of a launch: number n writes number `start + n` of the partial sums.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
struct Cubes {
    start: u32,
    count: u32,
}

/// The kernel of [`partial_sums`].
#[cube(launch_unchecked)]
fn sum_parts<G: Float, N: Size>(
    tensors: &Sequence<Summand<G, N>>,
    partials: &mut Array<f32>,
    cubes: Cubes,
    #[comptime] form: Form,
    #[define(G)] _dtype: StorageType,
    #[define(N)] _width: usize,
) {
    let mut sum = 0.0f32;
    #[unroll]
    for n in 0..comptime!(form.count) {
        let first = tensors.index(n).first as usize;
        if CUBE_POS >= first && CUBE_POS < first + tensors.index(n).cubes as usize {
            sum = sum_strided::<G, N>(tensors.index(n), CUBE_POS - first, form);
        }
    }
    let whole = sum_of_cube(sum);
    if UNIT_POS == 0 && CUBE_POS < cubes.count as usize {
        partials[cubes.start as usize + CUBE_POS] = whole;
    }
}

/// This unit's share of a tensor that so many cubes add up, of which this is number `cube`.
#[cube]
fn sum_strided<G: Float, N: Size>(
    tensor: &Summand<G, N>,
    cube: usize,
    #[comptime] form: Form,
) -> f32 {
    let vectors = tensor.vectors as usize;
    let stride = tensor.cubes as usize * UNITS;
    let own = cube * UNITS + UNIT_POS as usize;
    let mut sum = Vector::<f32, N>::new(0.0f32);
    for turn in 0..(vectors - 1) / (stride * AHEAD) + 1 {
        let mut values = Array::<Vector<f32, N>>::new(AHEAD);
        #[unroll]
        for n in 0..AHEAD {
            let at = own + (turn * AHEAD + n) * stride;
            values[n] = Vector::<f32, N>::cast_from(tensor.x[min(at, vectors - 1)]);
        }
        #[unroll]
        for n in 0..AHEAD {
            if own + (turn * AHEAD + n) * stride < vectors {
                if comptime!(form.special) {
                    sum += values[n] * values[n];
                } else {
                    sum += values[n];
                }
            }
        }
    }
    let mut whole = 0.0f32;
    #[unroll]
    for l in 0..comptime!(form.width) {
        whole += sum[l];
    }
    whole
}

/// The sum of a number of each unit of a cube.
#[cube]
fn sum_of_cube(own: f32) -> f32 {
    let unit = UNIT_POS as usize;
    let mut shared = SharedMemory::<f32>::new(UNITS);
    shared[unit] = own;
    sync_cube();
    #[unroll]
    for level in 0..comptime!(UNITS.ilog2()) {
        let half = comptime!(UNITS >> (level + 1));
        if unit < half {
            shared[unit] += shared[unit + half];
        }
        sync_cube();
    }
    shared[0]
}

/// The kernel of [`finish`].
#[cube(launch_unchecked)]
fn finish_sum(x: &Array<f32>, out: &mut Array<f32>, len: u32, #[comptime] form: Form) {
    let len = len as usize;
    let mut sum = 0.0f32;
    for turn in 0..(len - 1) / comptime!(UNITS * DEEP) + 1 {
        let mut values = Array::<f32>::new(DEEP);
        #[unroll]
        for n in 0..DEEP {
            let at = (turn * DEEP + n) * UNITS + UNIT_POS as usize;
            values[n] = select(at < len, x[min(at, len - 1)], 0.0f32);
        }
        #[unroll]
        for n in 0..DEEP {
            sum += values[n];
        }
    }
    let whole = sum_of_cube(sum);
    if UNIT_POS == 0 {
        out[0] = if comptime!(form.special) { f32::sqrt(whole) } else { whole };
    }
}

#[cfg(test)]
#[path = "adamw_tests.rs"]
mod tests;
