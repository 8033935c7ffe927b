use super::*;
use crate::nn::{KeptTensors, Shared};
use crate::ops::SequenceLengths;
use burn::module::Param;
use burn::tensor::{DType, TensorData};
use linattn_oracle::{Rng, assert_close};

type B = burn::backend::Flex;

const WIDTH: usize = 8;

fn draw<const D: usize>(rng: &mut Rng, shape: [usize; D]) -> Tensor<B, D> {
    let values: Vec<f64> = (0..shape.iter().product()).map(|_| rng.normal()).collect();
    Tensor::from_data(TensorData::new(values, shape), (&Default::default(), DType::F64))
}

/// Layers of queries, keys and values, and of beta.
struct Layers {
    linears: [Linear<B>; 4],
    convolutions: [Option<ShortConvolution<B>>; 3],
    canon: Option<CanonQkv<B>>,
}

impl Layers {
    /// Windows of the convolutions, 0 for none, and of Canon layers.
    fn draw(rng: &mut Rng, windows: [usize; 3], canon: usize) -> Self {
        let mut linear = |_| Linear::new(Param::from_tensor(draw(rng, [WIDTH, WIDTH])));
        let linears = [(); 4].map(&mut linear);
        let mut convolution = |window: usize| {
            (window > 0).then(|| ShortConvolution {
                weight: Param::from_tensor(draw(rng, [window, WIDTH])),
                bias: Some(Param::from_tensor(draw(rng, [WIDTH]))),
            })
        };
        let convolutions = windows.map(&mut convolution);
        let canon = CanonQkv::optional(canon, [WIDTH; 3], &Default::default());
        Self { linears, convolutions, canon }
    }

    /// Queries, keys, values and beta, and the next conv states.
    fn run(
        &self,
        x: &Tensor<B, 3>,
        mut conv_states: ConvPast<B>,
    ) -> (Vec<Tensor<B, 3>>, KeptTensors<B>) {
        let [q, k, v, beta] = &self.linears;
        let [of_q, of_k, of_v] = &self.convolutions;
        let qkv = ConvQkv::convolved([q, k, v], [of_q, of_k, of_v], [2; 3]);
        let gates = [Projection::beta(beta, 1.0)];
        let (Qkv { q, k, v }, [beta]) =
            qkv.scaled().canon(&self.canon).project(x, gates, &mut conv_states);
        let outputs = [q, k, v].map(|x| x.flatten::<3>(2, 3)).into_iter().chain([beta]);
        (outputs.collect(), conv_states.into_next())
    }
}

fn numbers(x: &Tensor<B, 3>) -> Vec<f64> {
    x.to_data().iter::<f64>().collect()
}

/// Runs two stretches of sequences in one row, and the same sequences alone.
fn stretches_are_right(layers: &Layers, rng: &mut Rng) {
    let stretches = [[3, 1, 7], [2, 5, 1]];
    let (mut all, mut alone) = (KeptTensors::default(), vec![KeptTensors::default(); 3]);
    for lengths in stretches {
        let lengths = SequenceLengths::new(&lengths);
        let x = draw(rng, [1, lengths.tokens(), WIDTH]);
        let (got, next) = layers.run(&x, ConvPast::after(all).among(&Shared::of_lengths(&lengths)));
        all = next;
        for (n, range) in lengths.ranges().enumerate() {
            let part = |x: &Tensor<B, 3>| x.clone().narrow(1, range.start, range.len());
            let (want, next) = layers.run(&part(&x), ConvPast::after(alone[n].clone()));
            for (i, (want, got)) in want.iter().zip(&got).enumerate() {
                let name = format!("output {i} of sequence {n}, {lengths:?}");
                assert_close(&name, &numbers(want), &numbers(&part(got)), 1e-6);
            }
            assert_eq!(all.len(), next.len());
            for (kept, want) in next.iter() {
                let name = format!("conv state {} of sequence {n}, {lengths:?}", kept.name());
                let got = all.get(kept).expect("what each keeps alone").clone();
                let got = numbers(&got.narrow(0, n, 1));
                assert_close(&name, &numbers(want), &got, 1e-6);
            }
            alone[n] = next;
        }
    }
}

#[test]
fn queries_keys_and_values_of_one_row_of_sequences_are_as_if_alone() {
    let mut rng = Rng::new(4);
    // One window, several, no convolution of queries, and Canon layers behind.
    for (windows, canon) in [([4; 3], 0), ([4, 3, 2], 0), ([0, 4, 4], 3), ([0; 3], 4)] {
        let layers = Layers::draw(&mut rng, windows, canon);
        stretches_are_right(&layers, &mut rng);
    }
}
