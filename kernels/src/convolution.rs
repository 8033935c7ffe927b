//! Short causal depthwise convolution over time, and the conv state that it hands on, in one launch.
//! ```text
//! seen    the conv state, and then x                            [B, W - 1 + T, D]
//! y_t     = f(bias + sum_w weight_w seen_{t+w})                 f: SiLU, sigmoid or nothing
//! next    the last W - 1 tokens of `seen`
//!
//! x, y:       [B, T, D]      F
//! conv_state: [B, W - 1, D]  F   the tokens before x
//! next:       [B, W - 1, D]  F   the conv state before what comes next
//! weight:     [W, D]         F   the last row meets the newest token
//! bias:       [D]            F
//!
//! Work:   a unit for each number of y, and for each of `next`: (T + W - 1) D of them a sequence. Units
//!         share nothing, so there is no barrier, no shared memory and no plane operation.
//! Cost:   2 W flops a number of y, x read W times, from cache but for once; bound by memory. Sums are
//!         f32 whatever F is.
//! Edges:  any B, T, D and W >= 2; B, T and D are run-time values: a new size compiles nothing.
//! Source: arXiv 2312.00752, whose W is 4. No gradient.
//! ```

use crate::SOURCE;
use crate::rowwise::{Activation, UNITS, activate, spread};
use cubecl::prelude::*;

/// Widest window whose sum is written out: all of its tokens are then asked for at once.
const UNROLLED: usize = 8;

/// Sizes of one launch, and what follows the sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// B, sequences.
    pub batch: usize,
    /// T, tokens of a sequence.
    pub tokens: usize,
    /// D, channels.
    pub channels: usize,
    /// W, tokens that a channel sees, at least 2.
    pub window: usize,
    /// Applied to the sum.
    pub activation: Activation,
}

impl Dims {
    /// Cubes of a launch; `None` if there is nothing to do, the device's counters cannot hold them or
    /// an index would pass 32 bits.
    pub fn cubes(&self, largest: (u32, u32, u32)) -> Option<CubeCount> {
        let units = self.batch * (self.tokens + self.window - 1) * self.channels;
        let weights = u32::try_from(self.window * self.channels).is_ok();
        spread(units.div_ceil(UNITS), largest).filter(|_| weights && self.tokens > 0)
    }
}

/// Tensors of one launch, contiguous, of one type, shaped as the module says.
pub struct Args<R: Runtime> {
    /// Tokens.
    pub x: TensorArg<R>,
    /// Weights.
    pub weight: TensorArg<R>,
    /// Bias.
    pub bias: Option<TensorArg<R>>,
    /// Tokens before `x`.
    pub conv_state: TensorArg<R>,
    /// Output; filled.
    pub y: TensorArg<R>,
    /// The next conv state; filled.
    pub next: TensorArg<R>,
}

/// Compile-time values of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Form {
    source: &'static str,
    window: usize,
    biased: bool,
    activation: Activation,
}

/// Launches the convolution on tensors of type `dtype`. `stand_in` is any tensor of that type; it takes
/// the place of a bias that is not there, and is not read.
pub fn launch<R: Runtime>(
    client: &ComputeClient<R>,
    cubes: CubeCount,
    dims: Dims,
    args: Args<R>,
    stand_in: impl FnOnce() -> TensorArg<R>,
    dtype: StorageType,
) {
    let form = Form {
        source: SOURCE,
        window: dims.window,
        biased: args.bias.is_some(),
        activation: dims.activation,
    };
    // SAFETY: units past the last sequence stop, and all else stays within `dims`, which the caller
    // promises; `form` says whether the stand-in is read.
    #[allow(unsafe_code)]
    unsafe {
        short_convolution::launch_unchecked::<R>(
            client,
            cubes,
            CubeDim::new_1d(UNITS as u32),
            OperandsLaunch::new(
                args.x,
                args.weight,
                args.bias.unwrap_or_else(stand_in),
                args.conv_state,
            ),
            ResultsLaunch::new(args.y, args.next),
            SizesLaunch::new(dims.batch as u32, dims.tokens as u32, dims.channels as u32),
            form,
            dtype,
        );
    }
}

/// Inputs of the kernel, shaped as the module says.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Operands<F: Float> {
    pub x: Tensor<F>,
    pub weight: Tensor<F>,
    pub bias: Tensor<F>,
    pub conv_state: Tensor<F>,
}

/// Outputs of the kernel, shaped as the module says.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct Results<F: Float> {
    pub y: Tensor<F>,
    pub next: Tensor<F>,
}

/// Sizes that are no part of the compiled code.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(crate) struct Sizes {
    /// B.
    pub batch: u32,
    /// T.
    pub tokens: u32,
    /// D.
    pub channels: u32,
}

/// One channel of one sequence.
#[derive(CubeType, Clone, Copy)]
struct Channel {
    /// Its first number in x and y.
    first: usize,
    /// Its first number in the conv states.
    first_of_conv_state: usize,
    /// Numbers from one token to the next, D.
    stride: usize,
}

/// The kernel. Units with a position past the last token copy the next conv state.
#[cube(launch_unchecked)]
pub(crate) fn short_convolution<F: Float>(
    x: &Operands<F>,
    out: &mut Results<F>,
    sizes: Sizes,
    #[comptime] form: Form,
    #[define(F)] _dtype: StorageType,
) {
    let tokens = sizes.tokens as usize;
    let channels = sizes.channels as usize;
    let before = comptime!(form.window - 1);
    let column = ABSOLUTE_POS % channels;
    let row = ABSOLUTE_POS / channels;
    let position = row % (tokens + before);
    let sequence = row / (tokens + before);
    if sequence >= sizes.batch as usize {
        terminate!();
    }
    let channel = Channel {
        first: sequence * tokens * channels + column,
        first_of_conv_state: sequence * before * channels + column,
        stride: channels,
    };
    if position < tokens {
        let mut sum = 0.0f32;
        if comptime!(form.biased) {
            sum = f32::cast_from(x.bias[column]);
        }
        let written_out = comptime!(form.window <= UNROLLED);
        #[unroll(written_out)]
        for w in 0..comptime!(form.window) {
            let value = seen::<F>(x, &channel, position + w, before);
            sum += value * f32::cast_from(x.weight[w * channels + column]);
        }
        out.y[channel.first + position * channels] =
            F::cast_from(activate(sum, comptime!(form.activation)));
    } else {
        let value = seen::<F>(x, &channel, position, before);
        out.next[channel.first_of_conv_state + (position - tokens) * channels] =
            F::cast_from(value);
    }
}

/// Token `position` of the conv state and then x, of one channel; the conv state has `before` tokens.
#[cube]
fn seen<F: Float>(
    x: &Operands<F>,
    channel: &Channel,
    position: usize,
    #[comptime] before: usize,
) -> f32 {
    let in_x = max(position, before) - before;
    let mut value = f32::cast_from(x.x[channel.first + in_x * channel.stride]);
    if position < before {
        value =
            f32::cast_from(x.conv_state[channel.first_of_conv_state + position * channel.stride]);
    }
    value
}
