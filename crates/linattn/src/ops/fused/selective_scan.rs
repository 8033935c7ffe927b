//! Mamba's recurrence, whose step sizes, input and output vectors depend on the data.
//! ```text
//! k_tin = f(e^{dt_ti A_in})        f(e) = e, or 2 e - 1 where states may change their sign
//! h_tin = k_tin h_{t-1,in} + dt_ti x_ti b_tn
//! y_ti  = sum_n c_tn h_tin
//! ```
//! Source: Gu and Dao, arXiv 2312.00752; states that change their sign: arXiv 2411.12537.

use super::SelectiveScan;
use crate::ops::backend::LinearAttentionBackend;
use crate::ops::tensors::{primitive, tensor};
use crate::ops::{OpError, accumulator, linear_scan};
use burn::tensor::{Tensor, backend::Backend, ops::FloatTensor};

/// Inputs of [`selective_scan`].
#[derive(Debug, Clone)]
pub struct SelectiveScanInputs<B: Backend> {
    /// `[B, T, I]`.
    pub x: Tensor<B, 3>,
    /// Step sizes, 0 or more, `[B, T, I]`.
    pub dt: Tensor<B, 3>,
    /// A, 0 or less, `[I, N]`.
    pub a: Tensor<B, 2>,
    /// Input vectors, shared by all channels, `[B, T, N]`.
    pub b: Tensor<B, 3>,
    /// Output vectors, shared by all channels, `[B, T, N]`.
    pub c: Tensor<B, 3>,
    /// h before the first token, `[B, 1, I N]`; zeros if absent.
    pub state: Option<Tensor<B, 3>>,
    /// Whether states may change their sign: then the share kept is `2 e^{dt A} - 1`.
    pub signed: bool,
}

impl<B: Backend> SelectiveScanInputs<B> {
    fn check(&self) -> Result<(), OpError> {
        let op = "selective_scan";
        let ([batch, tokens, channels], states) = (self.x.dims(), self.b.dims()[2]);
        if self.x.dims().contains(&0) {
            return Err(OpError::Empty { op, tensor: "x", got: self.x.dims().into() });
        }
        if states == 0 {
            return Err(OpError::Empty { op, tensor: "b", got: self.b.dims().into() });
        }
        let state = [batch, 1, channels * states];
        let given = self.state.as_ref().map_or(state, Tensor::dims);
        let vectors = [batch, tokens, states];
        let shapes: [(&'static str, Vec<usize>, Vec<usize>); 5] = [
            ("dt", self.dt.dims().into(), self.x.dims().into()),
            ("a", self.a.dims().into(), vec![channels, states]),
            ("b", self.b.dims().into(), vectors.into()),
            ("c", self.c.dims().into(), vectors.into()),
            ("state", given.into(), state.into()),
        ];
        match shapes.into_iter().find(|(_, got, want)| got != want) {
            Some((tensor, got, want)) => Err(OpError::Shape { op, tensor, got, want }),
            None => Ok(()),
        }
    }
}

/// Mamba's recurrence over whole sequences, one token included: y, `[B, T, I]`, and h after the last token,
/// `[B, 1, I N]`, in f32 (f64 where an input is). Gradients reach all inputs.
/// ```text
/// h_tin = e^{dt_ti A_in} h_{t-1,in} + dt_ti x_ti b_tn
/// y_ti  = sum_n c_tn h_tin
/// ```
/// # Errors
/// [`OpError`] names the first tensor that does not fit.
pub fn selective_scan<B: LinearAttentionBackend>(
    inputs: SelectiveScanInputs<B>,
) -> Result<(Tensor<B, 3>, Tensor<B, 3>), OpError> {
    inputs.check()?;
    let SelectiveScanInputs { x, dt, a, b, c, state, signed } = inputs;
    let [x, dt, b, c] = [x, dt, b, c].map(|x| primitive(accumulator(x)));
    let a = primitive(accumulator(a));
    let state = state.map(|state| primitive(accumulator(state)));
    Ok(scanned::<B>(SelectiveScan { x, dt, a, b, c, state, signed }))
}

fn scanned<B: LinearAttentionBackend>(
    x: SelectiveScan<FloatTensor<B>>,
) -> (Tensor<B, 3>, Tensor<B, 3>) {
    match B::fused_selective_scan(x.clone(), false) {
        Some(pass) => {
            let mut outputs = pass.outputs.into_iter().map(tensor);
            let mut next = || outputs.next().expect("y and the last state");
            (next(), next())
        }
        None => in_tensor_ops::<B>(x),
    }
}

/// The same as a linear scan of all I N numbers.
pub(in crate::ops) fn in_tensor_ops<B: LinearAttentionBackend>(
    scan: SelectiveScan<FloatTensor<B>>,
) -> (Tensor<B, 3>, Tensor<B, 3>) {
    let SelectiveScan { x, dt, a, b, c, state, signed } = scan;
    let [x, dt, b, c] = [x, dt, b, c].map(tensor::<B, 3>);
    let ([batch, tokens, channels], states) = (x.dims(), b.dims()[2]);
    let flat = |x: Tensor<B, 4>| x.reshape([batch, tokens, channels * states]);
    let written = flat((dt.clone() * x).unsqueeze_dim::<4>(3) * b.unsqueeze_dim::<4>(2));
    let rates = tensor::<B, 2>(a).unsqueeze::<4>();
    let kept = flat(dt.unsqueeze_dim::<4>(3) * rates).exp();
    let kept = if signed { kept * 2.0 - 1.0 } else { kept };
    let (h, last) = linear_scan(kept, written, state.map(tensor))
        .expect("all have the shapes that the fields say");
    let h: Tensor<B, 4> = h.reshape([batch, tokens, channels, states]);
    let y = h.matmul(c.unsqueeze_dim::<4>(3)).squeeze_dim::<3>(3);
    (y, last)
}

#[cfg(all(test, feature = "cpu"))]
mod tests {
    use super::*;
    use burn::backend::{Autodiff, Flex};
    use burn::tensor::{DType, TensorData};
    use linattn_oracle::Rng;

    /// y, the last state and the gradients of a number made of both, in order.
    fn outputs<I: LinearAttentionBackend>(
        inputs: &[Tensor<I, 3>],
        (state, signed): (bool, bool),
        scan: impl Fn(
            SelectiveScan<FloatTensor<Autodiff<I>>>,
        ) -> (Tensor<Autodiff<I>, 3>, Tensor<Autodiff<I>, 3>),
    ) -> Vec<Tensor<I, 3>> {
        let leaf = |x: &Tensor<I, 3>| Tensor::<Autodiff<I>, 3>::from_inner(x.clone());
        let leaves: Vec<_> = inputs.iter().map(|x| leaf(x).require_grad()).collect();
        let [x, dt, a, b, c, h] = <[_; 6]>::try_from(leaves.clone()).expect("six inputs");
        let (y, last) = scan(SelectiveScan {
            x: primitive(x),
            dt: primitive(dt),
            a: primitive(a.squeeze_dim::<2>(0)),
            b: primitive(b),
            c: primitive(c),
            state: state.then(|| primitive(h)),
            signed,
        });
        let weigh = |x: Tensor<Autodiff<I>, 3>| (x.clone() * x).sum();
        let gradients = (weigh(y.clone()) + weigh(last.clone())).backward();
        let found = leaves.iter().filter_map(|leaf| leaf.grad(&gradients));
        [y.inner(), last.inner()].into_iter().chain(found).collect()
    }

    /// Sizes are B, T, I and N; the limit is a share of the largest number.
    fn one_piece_gives_what_tensor_operations_give<I: LinearAttentionBackend>(
        [batch, tokens, channels, states]: [usize; 4],
        (dtype, limit): (DType, f64),
        device: &I::Device,
    ) {
        // The same each time: of a single number anything may be left.
        let mut rng = Rng::new(3);
        let mut draw = |shape: [usize; 3], low: f64, high: f64| {
            let numbers = 0..shape.iter().product();
            let numbers: Vec<f64> = numbers.map(|_| low + (high - low) * rng.uniform()).collect();
            let numbers = TensorData::new(numbers, shape).convert_dtype(dtype);
            Tensor::<I, 3>::from_data(numbers, (device, dtype))
        };
        let inputs = [
            draw([batch, tokens, channels], -1.0, 1.0),
            draw([batch, tokens, channels], 0.0, 1.0),
            draw([1, channels, states], -2.0, 0.0),
            draw([batch, tokens, states], -1.0, 1.0),
            draw([batch, tokens, states], -1.0, 1.0),
            draw([batch, 1, channels * states], -1.0, 1.0),
        ];
        for setting in [(false, false), (true, true), (true, false)] {
            let one = outputs(&inputs, setting, |x| {
                let taken = Autodiff::<I>::fused_selective_scan(x.clone(), false).is_some();
                assert!(taken, "the backend takes this");
                scanned::<Autodiff<I>>(x)
            });
            let many = outputs(&inputs, setting, in_tensor_ops::<Autodiff<I>>);
            assert_eq!(one.len(), many.len(), "as many gradients");
            for (n, (one, many)) in one.into_iter().zip(many).enumerate() {
                let largest = |x: Tensor<I, 3>| x.abs().max().into_data().iter::<f64>().next();
                let size = largest(many.clone()).unwrap_or(f64::NAN);
                let error = largest(one - many).unwrap_or(f64::NAN);
                assert!(error <= limit * size, "{setting:?}, tensor {n}: {error} of {size}");
            }
        }
    }

    /// Fewer tokens than a chunk and more, channels that fill no block, and several groups of them.
    #[test]
    fn on_the_cpu_one_piece_gives_what_tensor_operations_give() {
        for sizes in [[1, 1, 1, 1], [2, 9, 20, 16], [1, 8, 16, 4], [3, 17, 150, 3]] {
            let device = Default::default();
            for kind in [(DType::F32, 1e-5), (DType::F64, 1e-12)] {
                one_piece_gives_what_tensor_operations_give::<Flex>(sizes, kind, &device);
            }
        }
    }

    #[cfg(feature = "wgpu")]
    #[test]
    fn on_a_gpu_one_piece_gives_what_tensor_operations_give() {
        let (sizes, device) = ([2, 9, 20, 16], Default::default());
        let kind = (DType::F32, 1e-5);
        one_piece_gives_what_tensor_operations_give::<burn::backend::Wgpu>(sizes, kind, &device);
    }
}
