//! Short convolutions over sequences of one row against the same sequences one by one: outputs, conv states and
//! gradients, on Flex's loops, in tensor operations, and through kernels where there is a GPU.

use crate::support::alone;
use burn::backend::autodiff::Autodiff;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Int, Tensor, TensorData, backend::Backend};
use linattn::ops::{
    LinearAttentionBackend, OpError, SequenceLengths, short_convolution, short_convolution_varlen,
};
use linattn_oracle::{Rng, assert_close};

const CHANNELS: usize = 6;

/// A convolution over sequences.
struct Case {
    lengths: &'static [usize],
    window: usize,
    has_conv_state: bool,
}

const CASES: [Case; 5] = [
    Case { lengths: &[5, 1, 2, 9], window: 4, has_conv_state: true },
    Case { lengths: &[3, 70, 1, 1, 140], window: 4, has_conv_state: false },
    Case { lengths: &[4, 6, 4], window: 3, has_conv_state: true },
    Case { lengths: &[1, 1, 1], window: 4, has_conv_state: false },
    Case { lengths: &[2], window: 5, has_conv_state: true },
];

/// The inputs: x, weight and conv state.
struct Inputs<B: Backend> {
    x: Tensor<B, 3>,
    weight: Tensor<B, 2>,
    conv_state: Tensor<B, 3>,
}

impl<B: AutodiffBackend + LinearAttentionBackend> Inputs<B> {
    fn draw(case: &Case, dtype: DType, device: &B::Device) -> Self {
        let (sequences, tokens) = (case.lengths.len(), case.lengths.iter().sum());
        Self {
            x: draw("x", [1, tokens, CHANNELS], dtype, device).require_grad(),
            weight: draw("weight", [case.window, CHANNELS], dtype, device).require_grad(),
            conv_state: draw("conv_state", [sequences, case.window - 1, CHANNELS], dtype, device)
                .require_grad(),
        }
    }

    /// Outputs and next conv states of all sequences at once.
    fn together(&self, case: &Case) -> [Tensor<B, 3>; 2] {
        let Self { x, weight, conv_state } = self;
        let conv_state = case.has_conv_state.then(|| conv_state.clone());
        let lengths = SequenceLengths::new(case.lengths);
        let (y, next) = short_convolution_varlen(x.clone(), weight.clone(), conv_state, &lengths)
            .expect("they fit");
        [y, next]
    }

    /// The same of one sequence after another.
    fn apart(&self, case: &Case) -> [Tensor<B, 3>; 2] {
        let Self { x, weight, conv_state } = self;
        let (mut ys, mut conv_states, mut from) = (vec![], vec![], 0);
        for (n, &tokens) in case.lengths.iter().enumerate() {
            let conv_state = case.has_conv_state.then(|| conv_state.clone().narrow(0, n, 1));
            let x = x.clone().narrow(1, from, tokens);
            let (y, next) = short_convolution(x, weight.clone(), conv_state).expect("they fit");
            ys.push(y);
            conv_states.push(next);
            from += tokens;
        }
        [Tensor::cat(ys, 1), Tensor::cat(conv_states, 0)]
    }

    /// Outputs, conv states, and the gradients of a sum of both, by name.
    fn run(&self, [y, next]: [Tensor<B, 3>; 2]) -> Vec<(&'static str, Vec<f64>)> {
        let weights = |name, x: &Tensor<B, 3>| draw::<B, 3>(name, x.dims(), x.dtype(), &x.device());
        let loss = (y.clone() * weights("dy", &y)).sum();
        let loss = loss + (next.clone() * weights("dconv_state", &next)).sum();
        let found = loss.backward();
        let of_conv_state = self.conv_state.grad(&found).map_or(vec![], numbers);
        vec![
            ("y", numbers(y)),
            ("next conv state", numbers(next)),
            ("dx", numbers(self.x.grad(&found).expect("it is tracked"))),
            ("dweight", numbers(self.weight.grad(&found).expect("it is tracked"))),
            ("dconv_state", of_conv_state),
        ]
    }
}

fn draw<B: Backend, const D: usize>(
    name: &str,
    shape: [usize; D],
    dtype: DType,
    device: &B::Device,
) -> Tensor<B, D> {
    let mut rng = Rng::named(9, name);
    let values: Vec<f64> = (0..shape.iter().product()).map(|_| rng.normal()).collect();
    let data = TensorData::new(values, shape).convert_dtype(dtype);
    Tensor::from_data(data, (device, dtype))
}

fn numbers<B: Backend, const D: usize>(x: Tensor<B, D>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

fn every_case<B: AutodiffBackend + LinearAttentionBackend>(
    dtype: DType,
    limit: f64,
    device: &B::Device,
) {
    let _alone = alone();
    for case in CASES {
        let inputs = Inputs::<B>::draw(&case, dtype, device);
        let want = inputs.run(inputs.apart(&case));
        let got = inputs.run(inputs.together(&case));
        for ((name, want), (_, got)) in want.iter().zip(&got) {
            assert_close(&format!("{name}, {dtype:?}, {:?}", case.lengths), want, got, limit);
        }
    }
}

#[test]
fn sequences_of_one_row_are_as_if_alone() {
    type B = Autodiff<burn::backend::Flex>;
    every_case::<B>(DType::F64, 1e-12, &Default::default());
    every_case::<B>(DType::F32, 1e-6, &Default::default());
    // Flex's loops take no f16: these are tensor operations.
    every_case::<B>(DType::F16, 3e-3, &Default::default());
}

#[cfg(feature = "wgpu")]
#[test]
fn sequences_of_one_row_are_as_if_alone_on_a_gpu() {
    let Some(device) = crate::support::wgpu() else { return };
    every_case::<Autodiff<burn::backend::Wgpu>>(DType::F32, 1e-5, &device);
    every_case::<Autodiff<burn::backend::Wgpu>>(DType::F16, 8e-3, &device);
}

/// Sums of four tokens, without a graph: next conv states then have a kernel on GPUs.
fn sums_of_four<B: LinearAttentionBackend>(device: &B::Device) {
    let x = Tensor::<B, 1, Int>::arange(0..6, device).float().reshape([1, 6, 1]);
    let lengths = SequenceLengths::new(&[1, 5]);
    let conv_state = Some(Tensor::full([2, 3, 1], 9.0, device));
    let weight = Tensor::ones([4, 1], device);
    let (y, conv_state) =
        short_convolution_varlen(x, weight, conv_state, &lengths).expect("they fit");
    assert_eq!(numbers(y), [27.0, 28.0, 21.0, 15.0, 10.0, 14.0]);
    assert_eq!(numbers(conv_state), [9.0, 9.0, 0.0, 3.0, 4.0, 5.0]);
}

#[test]
fn each_sequence_has_a_conv_state_of_its_own() {
    sums_of_four::<burn::backend::Flex>(&Default::default());
}

#[cfg(feature = "wgpu")]
#[test]
fn each_sequence_has_a_conv_state_of_its_own_on_a_gpu() {
    let Some(device) = crate::support::wgpu() else { return };
    sums_of_four::<burn::backend::Wgpu>(&device);
}

#[test]
fn lengths_that_do_not_fit_are_refused() {
    type B = burn::backend::Flex;
    let run = |batch: usize, conv_state: usize, lengths: &[usize]| {
        let x = Tensor::<B, 3>::zeros([batch, 6, 2], &Default::default());
        let weight = Tensor::zeros([4, 2], &Default::default());
        let conv_state = Some(Tensor::zeros([conv_state, 3, 2], &Default::default()));
        short_convolution_varlen(x, weight, conv_state, &SequenceLengths::new(lengths)).err()
    };
    let op = "short_convolution";
    assert_eq!(run(1, 2, &[4, 2]), None);
    assert_eq!(run(2, 2, &[4, 2]), Some(OpError::Rows { op, batch: 2 }));
    assert_eq!(run(1, 2, &[4, 3]), Some(OpError::Tokens { op, tokens: 6, got: 7 }));
    assert_eq!(run(1, 2, &[6, 0]), Some(OpError::Lengths { op, got: vec![0, 6, 6] }));
    let (got, want) = (vec![1, 3, 2], vec![2, 3, 2]);
    assert_eq!(run(1, 1, &[4, 2]), Some(OpError::Shape { op, tensor: "conv_state", got, want }));
}
