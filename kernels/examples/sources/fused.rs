//! The layers around a recurrence in training.

use crate::runtime::Recorder;
use crate::target::Target;
use cubecl::ir::{ElemType, FloatKind, IntKind, StorageType};
use cubecl::prelude::*;
use cubecl::server::Handle;
use linattn_kernels::fused::{
    adamw, argmax, block_linear, conv_state, cross_entropy, diagonal_taps, embedding,
    long_convolution, lstm, rotary, selective_scan, softmax, ttt_linear, ttt_mlp,
};
use std::error::Error;

const F32: StorageType = StorageType::Scalar(ElemType::Float(FloatKind::F32));
const I32: StorageType = StorageType::Scalar(ElemType::Int(IntKind::I32));
/// Positions, and the width of a layer.
const ROWS: usize = 65_536;
const WIDTH: usize = 128;

/// Layers around a recurrence, launched in one type.
pub struct Fused<'a, T: Target> {
    pub client: &'a ComputeClient<Recorder<T>>,
    pub dtype: StorageType,
}

impl<T: Target> Fused<'_, T> {
    /// The taps of a diagonal model with an input vector, and their gradients; `enter` is called after each.
    fn diagonal_taps(
        &self,
        steps: diagonal_taps::Steps,
        mut enter: impl FnMut(&str) -> Result<(), Box<dyn Error>>,
    ) -> Result<(), Box<dyn Error>> {
        let dims = diagonal_taps::Dims { channels: 4, modes: 8, length: 17 };
        let [vector, matrix, both, taps] = [4, 32, 64, 68].map(|numbers| self.memory(numbers, F32));
        let inputs = diagonal_taps::Inputs {
            log_dt: &vector,
            log_a_real: &matrix,
            a_imag: &matrix,
            c: &both,
            b: Some(&both),
            d: &vector,
        };
        diagonal_taps::taps(self.client, dims, steps, inputs)?;
        enter("")?;
        diagonal_taps::gradients(self.client, dims, steps, inputs, &taps)?;
        enter("-gradients")
    }

    /// Launches all; `enter` is called after each.
    pub fn all(
        &self,
        mut enter: impl FnMut(&str) -> Result<(), Box<dyn Error>>,
    ) -> Result<(), Box<dyn Error>> {
        // Rows that a few units hold, that a cube holds, and that are longer.
        for vocab in [16, 8192, 50_257, 50_304] {
            for (biased, gradient) in [(false, true), (true, true), (false, false)] {
                self.losses(vocab, biased, gradient)?;
                enter(&format!("-{vocab}-bias_{biased}-gradient_{gradient}"))?;
            }
        }
        cross_entropy::total(self.client, &self.memory(ROWS, F32), ROWS)?;
        enter("")?;
        for vocab in [16, 8192] {
            self.look_up(vocab)?;
            enter(&format!("-{vocab}"))?;
        }
        for (rotated, back) in [(WIDTH, false), (WIDTH, true), (WIDTH / 2, false)] {
            let dims = rotary::Dims { batch: 2, tokens: 8, heads: 2, width: WIDTH, rotated };
            let x = self.memory(32 * WIDTH, self.dtype);
            let table = self.memory(8 * WIDTH, F32);
            rotary::rotate(self.client, dims, &x, &table, back, self.dtype)?;
            enter(&format!("-{rotated}-back_{back}"))?;
        }
        let dims = long_convolution::Dims { batch: 2, tokens: 20, channels: 4, length: 17 };
        let (x, taps) = (self.memory(160, self.dtype), self.memory(68, F32));
        for back in [false, true] {
            long_convolution::convolve(self.client, dims, &x, &taps, back, self.dtype)?;
            enter(&format!("-back_{back}"))?;
        }
        long_convolution::tap_gradients(self.client, dims, &x, &x, self.dtype)?;
        enter("-taps")?;
        argmax::argmax(self.client, [4, 40], &x, [self.dtype, I32])?;
        enter("-argmax")?;
        for steps in [diagonal_taps::Steps::Zoh, diagonal_taps::Steps::Bilinear] {
            self.diagonal_taps(steps, |launched| enter(&format!("-{steps:?}{launched}")))?;
        }
        // Rows of a plane in single numbers, of a cube in fours, and of all keys.
        let causal = softmax::Seen::Causal { window: 16 };
        for (keys, seen) in [(127, causal), (4096, causal), (64, softmax::Seen::All)] {
            let rows = softmax::Rows { count: 32, queries: 2, keys, seen };
            let x = self.memory(32 * keys, F32);
            let y = softmax::forward(self.client, rows, &x)?;
            enter(&format!("-{keys}"))?;
            softmax::backward(self.client, rows, &y.handle, &x)?;
            enter(&format!("-{keys}-gradient"))?;
        }
        for given in [false, true] {
            self.conv_states(given, None)?;
            enter(&format!("-states_{given}"))?;
            self.conv_states(given, Some(&[0, 1]))?;
            enter(&format!("-lengths-states_{given}"))?;
            // Of few channels, and of so many that a unit takes more of a state.
            for (batch, states) in [(2, 4), (2, 16), (256, 16)] {
                self.selective_scan(batch, states, given)?;
                enter(&format!("-{states}-of_{batch}-state_{given}"))?;
            }
            for (from, to) in [(4, 4), (32, 128)] {
                self.blocks(from, to, given)?;
                enter(&format!("-{from}x{to}-bias_{given}"))?;
            }
            // Recurrent weights in registers, and from cache.
            for width in [32, 128] {
                for cell in [lstm::Cell::Sigmoid, lstm::Cell::Exponential] {
                    self.lstm(cell, width, given)?;
                    enter(&format!("-{cell:?}-{width}-state_{given}"))?;
                }
            }
            for width in [16, 64] {
                self.ttt_linear(width, given)?;
                enter(&format!("-{width}-gradients_{given}"))?;
            }
            for width in [8, 16, 64] {
                self.ttt_mlp(width, given)?;
                enter(&format!("-{width}-hidden_{}-gradients_{given}", 4 * width))?;
            }
        }
        for count in [1, 8] {
            for len in [WIDTH, WIDTH + 1] {
                for clipped in [false, true] {
                    self.update(count, len, clipped)?;
                    enter(&format!("-{count}x{len}-clip_{clipped}"))?;
                }
            }
        }
        Ok(())
    }

    fn losses(&self, vocab: usize, biased: bool, gradient: bool) -> Result<(), Box<dyn Error>> {
        let padding = vocab.next_multiple_of(8) - vocab;
        let dims = cross_entropy::Dims { rows: 16, vocab, padding };
        let columns = vocab + padding;
        let (logits, bias) =
            (self.memory(16 * columns, self.dtype), self.memory(columns, self.dtype));
        let target = self.memory(16, I32);
        let types = cross_entropy::Types { logits: self.dtype, bias: self.dtype, target: I32 };
        let bias = biased.then_some(&bias);
        let inputs = cross_entropy::Inputs { logits: &logits, bias, target: &target };
        let loss = cross_entropy::Loss { scale: 1.0, gradient };
        cross_entropy::losses(self.client, dims, inputs, loss, types)?;
        Ok(())
    }

    fn look_up(&self, vocab: usize) -> Result<(), Box<dyn Error>> {
        let dims = embedding::Dims { rows: ROWS, vocab, width: WIDTH };
        let (table, ids) = (self.memory(vocab * WIDTH, F32), self.memory(ROWS, I32));
        let types = embedding::Types { rows: F32, ids: I32, out: self.dtype };
        let y = embedding::gather(self.client, &table, &ids, dims, types)?;
        let types = embedding::Types { rows: self.dtype, ids: I32, out: F32 };
        embedding::table_gradient(self.client, &y.handle, &ids, dims, types)?;
        Ok(())
    }

    fn blocks(&self, from: usize, to: usize, biased: bool) -> Result<(), Box<dyn Error>> {
        let (rows, heads) = (64, WIDTH / from);
        let dims = block_linear::Dims { rows, heads, from, to };
        let x = self.memory(rows * WIDTH, self.dtype);
        let [weight, bias] = [from * to, to].map(|numbers| self.memory(heads * numbers, F32));
        let (bias, types) = (biased.then_some(&bias), [self.dtype, F32]);
        let y = block_linear::multiply(self.client, dims, &x, &weight, bias, types)?;
        block_linear::weight_gradient(self.client, dims, &x, &y.handle, types)?;
        Ok(())
    }

    fn conv_states(&self, given: bool, cu_seqlens: Option<&[usize]>) -> Result<(), Box<dyn Error>> {
        let batch = if cu_seqlens.is_some() { 1 } else { 2 };
        let dims = conv_state::Dims { batch, tokens: 1, columns: 3 * WIDTH };
        let convolutions = conv_state::Convolutions { widths: vec![WIDTH; 3], window: 4 };
        let (x, state) = (self.memory(6 * WIDTH, self.dtype), self.memory(6 * WIDTH, self.dtype));
        let states = if given { vec![&state; 3] } else { vec![] };
        let inputs = conv_state::Inputs { x: &x, states: &states, cu_seqlens };
        conv_state::next_states(self.client, dims, &convolutions, inputs, self.dtype)?;
        Ok(())
    }

    /// Forward, kept and not, and backward.
    fn selective_scan(
        &self,
        batch: usize,
        states: usize,
        whole: bool,
    ) -> Result<(), Box<dyn Error>> {
        let dims = selective_scan::Dims { batch, tokens: 8, channels: WIDTH, states };
        let x = self.memory(batch * 8 * WIDTH * states, F32);
        let state = whole.then_some(&x);
        let [dt, a, b, c] = [&x; 4];
        let inputs = selective_scan::Inputs { x: &x, dt, a, b, c, state, signed: whole };
        for keep in [false, true] {
            selective_scan::forward(self.client, dims, &inputs, keep)?;
        }
        let given = selective_scan::Given { h: &x, d_y: Some(&x), d_state: state };
        selective_scan::backward(self.client, dims, &inputs, given)?;
        Ok(())
    }

    /// Forward, kept and not, and backward.
    fn lstm(&self, cell: lstm::Cell, width: usize, whole: bool) -> Result<(), Box<dyn Error>> {
        let dims = lstm::Dims { cell, batch: 2, tokens: 8, heads: 4, width };
        let x = self.memory(16 * 16 * width * width, F32);
        let scaled = cell == lstm::Cell::Exponential;
        let state = whole.then_some(lstm::State { h: &x, c: &x, scale: scaled.then_some([&x; 2]) });
        for keep in [false, true] {
            lstm::forward(self.client, dims, &lstm::Inputs { x: &x, r: &x, state }, keep)?;
        }
        let all = whole.then_some(&x);
        let of_n = all.filter(|_| scaled);
        let given = lstm::Given {
            saved: &x,
            r_transposed: &x,
            c: all,
            n: of_n,
            d_h: Some(&x),
            d_c: all,
            d_n: of_n,
        };
        lstm::backward(self.client, dims, given)?;
        Ok(())
    }

    /// Forward, kept and not, and backward.
    fn ttt_linear(&self, width: usize, whole: bool) -> Result<(), Box<dyn Error>> {
        let dims = ttt_linear::Dims { batch: 2, tokens: 32, heads: 2, width, rows: 16 };
        let x = self.memory(16 * (width + 1) * width, F32);
        let [q, k, v, rate, scale, norm_weight, norm_bias, weights] = [&x; 8];
        let epsilon = 1e-6;
        let inputs =
            ttt_linear::Inputs { q, k, v, rate, scale, norm_weight, norm_bias, weights, epsilon };
        for keep in [false, true] {
            ttt_linear::forward(self.client, dims, &inputs, keep)?;
        }
        let d_weights = whole.then_some(&x);
        let given = ttt_linear::Given { starts: &x, d_y: Some(&x), d_weights };
        ttt_linear::backward(self.client, dims, &inputs, given)?;
        Ok(())
    }

    /// Forward, kept and not, and backward.
    fn ttt_mlp(&self, width: usize, whole: bool) -> Result<(), Box<dyn Error>> {
        let rows = ttt_linear::Dims { batch: 2, tokens: 32, heads: 2, width, rows: 16 };
        let dims = ttt_mlp::Dims { rows, expand: 4 };
        if ttt_mlp::check(self.client, dims).is_err() {
            return Ok(()); // The widest wants more shared memory than some of them have.
        }
        let x = self.memory(32 * (width + 1) * (4 * width + 1), F32);
        let [q, k, v, rate, scale, norm_weight, norm_bias, weights] = [&x; 8];
        let epsilon = 1e-6;
        let rows =
            ttt_linear::Inputs { q, k, v, rate, scale, norm_weight, norm_bias, weights, epsilon };
        let inputs = ttt_mlp::Inputs { rows, second: &x };
        for keep in [false, true] {
            ttt_mlp::forward(self.client, dims, &inputs, keep)?;
        }
        let d_weights = [whole.then_some(&x); 2];
        let given = ttt_mlp::Given { starts: [&x; 2], d_y: Some(&x), d_weights };
        ttt_mlp::backward(self.client, dims, &inputs, given)?;
        Ok(())
    }

    fn update(&self, count: usize, len: usize, clipped: bool) -> Result<(), Box<dyn Error>> {
        let (param, moment) = (self.memory(len, F32), self.memory(len, F32));
        let gradient = self.memory(len, self.dtype);
        let (m, v) = (&moment, &moment);
        let tensor = adamw::Tensors { param: &param, gradient: &gradient, m, v, len, decay: 0.1 };
        let hyper = adamw::Hyper {
            learning_rate: 1e-3,
            beta_1: 0.9,
            beta_2: 0.95,
            epsilon: 1e-8,
            correction_1: 0.1,
            correction_2: 0.05,
        };
        let norm = adamw::norm(self.client, &vec![(&gradient, len); count], self.dtype)?;
        let types = adamw::Types { param: F32, gradient: self.dtype };
        let clip = clipped.then_some(adamw::Clip { norm: &norm.handle, longest: 1.0 });
        adamw::step(self.client, &vec![tensor; count], hyper, clip, types)?;
        Ok(())
    }

    fn memory(&self, numbers: usize, dtype: StorageType) -> Handle {
        self.client.empty(numbers * dtype.size())
    }
}
