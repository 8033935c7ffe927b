//! The mixer that docs/add_a_mixer.md adds: compiled as it stands there, and held to what the page says.

// Nobody asks the guide's own list.
#![allow(dead_code)]

mod learnt_decay;

use super::{
    ConfigError, Cost, LinearAttentionBackend, MatrixPast, MatrixState, MixerState, Shared, Stack,
    TokenMixer, Varlen, key_width, linear_flops, memory_cost,
};
use crate::ops::cat;
use burn::backend::{Autodiff, Flex};
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Distribution, Tensor};
pub use learnt_decay::{LearntDecay, LearntDecayConfig};
use linattn_oracle::assert_close;
use serde::{Deserialize, Serialize};

mixers! {
    /// Linear attention with a learnt decay.
    "learnt_decay" LearntDecay(LearntDecayConfig);
}

const MIXERS: &[&str] = &[
    "learnt_decay = { heads = 2 }",
    "learnt_decay = { heads = 3, key_width = 5, norm_eps = 1e-3 }",
];

type B = Autodiff<Flex>;
const WIDTH: usize = 24;

fn config(text: &str) -> MixerConfig {
    #[derive(Deserialize)]
    struct Holder {
        mixer: MixerConfig,
    }
    let holder: Holder = toml::from_str(&format!("mixer.{text}")).expect("it is a config");
    holder.mixer
}

fn numbers<B: Backend, const R: usize>(x: Tensor<B, R>) -> Vec<f64> {
    x.into_data().iter::<f64>().collect()
}

#[test]
fn the_mixer_of_the_guide_keeps_its_promises() {
    let device = Default::default();
    for text in MIXERS {
        let config = config(text);
        assert_eq!(MixerConfig::NAMES, [config.name()]);
        let mixer = config.init::<B>(WIDTH, &device).unwrap();
        assert!(mixer.fixed_size_state() && mixer.takes_bf16(), "{text}: it says so");
        let x = Tensor::<B, 3>::random([2, 21, WIDTH], Distribution::Normal(0.0, 1.0), &device);
        let (whole, last) = mixer.forward(x.clone(), None);
        let (first, mut state) = mixer.forward(x.clone().narrow(1, 0, 9), None);
        let mut outputs = vec![first];
        for t in 9..21 {
            let (y, next) = mixer.step(x.clone().narrow(1, t, 1).squeeze_dim(1), Some(state));
            outputs.push(y.unsqueeze_dim(1));
            state = next;
        }
        let stepped = cat(outputs, 1);
        assert_close(text, &numbers(whole.clone()), &numbers(stepped), 1e-5);

        let MixerState::Matrix(last) = last else { panic!("another kind of state") };
        let bytes = 4 * last.memory.shape().num_elements() as u64 / 2;
        assert_eq!(config.cost(WIDTH, 21).unwrap().state_bytes, bytes, "{text}: of one of two");

        let gradients = (whole * x).sum().backward();
        mixer.visit(&mut Learnt(&gradients));
    }
    let refused = config("learnt_decay = { heads = 5 }").init::<B>(WIDTH, &device).unwrap_err();
    assert!(refused.to_string().starts_with("`learnt_decay.heads` is 5"), "{refused}");
}

/// Panics at a parameter that no gradient reaches.
struct Learnt<'a>(&'a <B as AutodiffBackend>::Gradients);

impl ModuleVisitor<B> for Learnt<'_> {
    fn visit_float<const R: usize>(&mut self, param: &Param<Tensor<B, R>>) {
        let gradient = param.val().grad(self.0).expect("it has a gradient");
        assert!(numbers(gradient).iter().any(|x| *x != 0.0));
    }
}
