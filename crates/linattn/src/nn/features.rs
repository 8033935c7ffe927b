//! Feature maps of linear attention: what is done to queries and keys, so that phi(q) . phi(k) scores
//! a key for a query.
//! ```text
//! x' = x / K^(1/4), so that q' . k' = s = q . k / sqrt(K)           phi(q) . phi(k)
//! identity             x                                             q . k
//! elu, relu            elu(x) + 1, max(x, 0)
//! taylor               1, x', x'_i^2 / sqrt(2), x'_i x'_j            1 + s + s^2 / 2
//! learnable_square     y'_i^2, sqrt(2) y'_i y'_j                     (y_q . y_k)^2 / K
//!                      y = gamma (x - mean) / deviation + beta
//! performer            exp(w_i . x' - |x'|^2 / 2) / sqrt(m)          e^s on average
//! rfa                  sin(w_i . x), cos(w_i . x), over sqrt(m)      e^{-|q - k|^2 / 2} on average
//!                      x of length 1
//! cosformer            r cos(a), r sin(a), r = max(x, 0)             r_q . r_k cos(a_q - a_k)
//!                      a = pi / 2 position / length
//! hedgehog             softmax of 2 y and -2 y, y = x W + b
//! dijiang              d_i exp(t_i (C x)_i), C the cosine transform
//! dpfp                 r_i r_{i - n}, r = max([x, -x], 0), n = 1 .. nu
//! elementwise_product  (x W_1 + b_1) (x W_2 + b_2)
//! ```
//! Pairs i < j stand for their twins j > i as well. w and t are drawn from N(0, 1) once and for all,
//! by a seed: all layers and heads have the same. Performer's authors draw again every so many steps of training, which a
//! layer here cannot count; their m is K ln K. gamma, beta, W, b and d are learnt. RFA's paper also learns a width
//! for each number of w, which is 1 here. DiJiang's released code has the transpose of C and a softmax in place
//! of d and the exponential; this is its paper's map.
//!
//! Sources: elu, arXiv 2006.16236; taylor, Based, arXiv 2402.18668; learnable_square, ReBased, arXiv
//! 2402.10644; performer, arXiv 2009.14794; rfa, arXiv 2103.02143; cosformer, arXiv 2202.08791;
//! hedgehog, arXiv 2402.04347; dijiang, arXiv 2403.19928; dpfp, arXiv 2102.11174.

use super::layers::{Linear, l2_normalize, standardize};
use super::{ConfigError, LARGEST, positive};
use crate::ops::{Along, LinearAttentionBackend, accumulator, cat, typed};
use burn::module::{Initializer, Module, Param};
use burn::nn::LinearConfig;
use burn::tensor::activation::{relu, softmax};
use burn::tensor::{Int, Tensor, TensorData, backend::Backend};
use serde::{Deserialize, Serialize};
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_PI_2, PI, SQRT_2, TAU};

/// Which feature map: a name, or a table for those that have options.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum FeatureMap {
    /// Nothing.
    Identity,
    /// `elu(x) + 1`, which is positive.
    #[default]
    Elu,
    /// `max(x, 0)`.
    Relu,
    /// The Taylor series of exp up to the square: 1 + K + K (K + 1) / 2 features.
    Taylor,
    /// The square of a product of normalised vectors, with weights: K (K + 1) / 2 features.
    LearnableSquare,
    /// Positive orthogonal random features.
    Performer {
        /// m; K ln K, rounded up, by default.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        features: Option<usize>,
        /// Of the draw.
        #[serde(default)]
        seed: u64,
    },
    /// Random Fourier features: 2 m.
    Rfa {
        /// m; K by default.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        features: Option<usize>,
        /// Of the draw.
        #[serde(default)]
        seed: u64,
    },
    /// Weights that fall with the distance: 2 K features.
    Cosformer {
        /// The distance whose weight is 0, at least the tokens of the longest sequence: beyond it
        /// weights would be negative.
        length: usize,
    },
    /// A learned map of each head, under a softmax: 2 K features.
    Hedgehog,
    /// Exponentials of the cosine transform, weighted. One map serves queries and keys.
    Dijiang {
        /// Of the draw.
        #[serde(default)]
        seed: u64,
    },
    /// Products of neighbours at `nu` distances: 2 K nu features.
    Dpfp {
        /// How many distances, below 2 K.
        nu: usize,
    },
    /// The product of two linear maps.
    ElementwiseProduct,
}

impl FeatureMap {
    /// Its name in a config.
    pub fn name(self) -> &'static str {
        match self {
            Self::Identity => "identity",
            Self::Elu => "elu",
            Self::Relu => "relu",
            Self::Taylor => "taylor",
            Self::LearnableSquare => "learnable_square",
            Self::Performer { .. } => "performer",
            Self::Rfa { .. } => "rfa",
            Self::Cosformer { .. } => "cosformer",
            Self::Hedgehog => "hedgehog",
            Self::Dijiang { .. } => "dijiang",
            Self::Dpfp { .. } => "dpfp",
            Self::ElementwiseProduct => "elementwise_product",
        }
    }

    /// Features of a key of `key_width` numbers.
    pub fn width(self, key_width: usize) -> usize {
        let pairs = key_width * (key_width + 1) / 2;
        match self {
            Self::Taylor => 1 + key_width + pairs,
            Self::LearnableSquare => pairs,
            Self::Performer { .. } => self.random_vectors(key_width),
            Self::Rfa { .. } => 2 * self.random_vectors(key_width),
            Self::Cosformer { .. } | Self::Hedgehog => 2 * key_width,
            Self::Dpfp { nu } => 2 * key_width * nu,
            Self::Identity
            | Self::Elu
            | Self::Relu
            | Self::Dijiang { .. }
            | Self::ElementwiseProduct => key_width,
        }
    }

    /// m: random vectors of Performer and RFA.
    fn random_vectors(self, key_width: usize) -> usize {
        match self {
            Self::Performer { features: None, .. } => {
                let width = key_width as f64;
                ((width * width.ln()).ceil() as usize).max(1)
            }
            Self::Performer { features, .. } | Self::Rfa { features, .. } => {
                features.unwrap_or(key_width)
            }
            _ => 0,
        }
    }

    /// Whether no score is negative, so that scores can be divided by their sum.
    pub(crate) fn has_positive_scores(self) -> bool {
        !matches!(self, Self::Identity | Self::Rfa { .. } | Self::ElementwiseProduct)
    }

    /// Whether no feature is negative, so that features can be divided by their sum.
    pub(crate) fn is_positive(self) -> bool {
        let signed = matches!(self, Self::Taylor | Self::LearnableSquare | Self::Dijiang { .. });
        self.has_positive_scores() && !signed
    }

    /// Whether queries and keys may learn a map each.
    pub(crate) fn may_differ(self) -> bool {
        matches!(self, Self::LearnableSquare | Self::Hedgehog | Self::ElementwiseProduct)
    }

    /// Multiplications and additions for one query or key.
    pub(crate) fn flops(self, key_width: usize) -> u64 {
        let product = |to: usize| 2 * key_width as u64 * to as u64;
        let products = match self {
            Self::Performer { .. } | Self::Rfa { .. } => product(self.random_vectors(key_width)),
            Self::Hedgehog | Self::Dijiang { .. } => product(key_width),
            Self::ElementwiseProduct => 2 * product(key_width),
            _ => 0,
        };
        products + self.width(key_width) as u64
    }

    /// The number of features, if the options fit keys of `key_width` numbers.
    pub(crate) fn check(self, key_width: usize) -> Result<usize, ConfigError> {
        positive("key_width", key_width)?;
        let option = match self {
            Self::Performer { .. } | Self::Rfa { .. } => {
                positive("features", self.random_vectors(key_width)).map(drop)
            }
            Self::Cosformer { length } => positive("length", length).map(drop),
            Self::Dpfp { nu } => check_nu(nu, key_width),
            _ => Ok(()),
        };
        option.map_err(|e| e.within(format!("feature_map.{}", self.name())))?;
        check_width(key_width, self.width(key_width))
    }

    /// Refuses sequences of `tokens` tokens if they are too long.
    pub(crate) fn check_length(self, tokens: usize) -> Result<(), ConfigError> {
        match self {
            Self::Cosformer { length } if tokens > length => Err(ConfigError::new(
                "feature_map.cosformer.length",
                length,
                format!("at least {tokens}, the tokens of the longest sequence"),
            )),
            _ => Ok(()),
        }
    }

    /// The map for `heads` heads of keys of `key_width` numbers.
    /// # Errors
    /// [`ConfigError`] names the first option that does not fit.
    pub fn init<B: Backend>(
        self,
        heads: usize,
        key_width: usize,
        device: &B::Device,
    ) -> Result<Features<B>, ConfigError> {
        self.check(key_width)?;
        let linear = || Linear::from(LinearConfig::new(key_width, key_width).init::<B>(device));
        let is_square = self == Self::LearnableSquare;
        let is_product = self == Self::ElementwiseProduct;
        let is_dijiang = matches!(self, Self::Dijiang { .. });
        Ok(Features {
            gamma: is_square.then(|| Initializer::Ones.init([key_width], device)),
            beta: is_square.then(|| Initializer::Zeros.init([key_width], device)),
            weight: is_dijiang.then(|| Initializer::Ones.init([key_width], device)),
            layer: (self == Self::Hedgehog).then(|| HeadMaps::identity(heads, key_width, device)),
            layer1: is_product.then(linear),
            layer2: is_product.then(linear),
            map: self,
            fixed: self.fixed(key_width),
        })
    }

    /// Columns that a vector is multiplied by and that are not learnt, `[K, m]`, or nothing.
    fn fixed(self, key_width: usize) -> Vec<f32> {
        let rows = match self {
            Self::Performer { seed, .. } => {
                orthogonal_rows(self.random_vectors(key_width), key_width, &mut Normal(seed))
            }
            Self::Rfa { seed, .. } => {
                let mut normal = Normal(seed);
                (0..self.random_vectors(key_width)).map(|_| normal.row(key_width)).collect()
            }
            Self::Dijiang { seed } => {
                let scales = Normal(seed).row(key_width);
                let scaled = |(i, t): (usize, f64)| -> Vec<f64> {
                    cosine_row(i, key_width).iter().map(|c| t * c).collect()
                };
                scales.into_iter().enumerate().map(scaled).collect()
            }
            _ => vec![],
        };
        let column = |i: usize| rows.iter().map(move |row: &Vec<f64>| row[i] as f32);
        match rows.is_empty() {
            true => vec![],
            false => (0..key_width).flat_map(column).collect(),
        }
    }
}

/// A feature map with what it learns and what was drawn for it. `K` to as many features as
/// [`FeatureMap::width`] says.
#[derive(Module, Debug)]
pub struct Features<B: Backend> {
    gamma: Option<Param<Tensor<B, 1>>>,
    beta: Option<Param<Tensor<B, 1>>>,
    weight: Option<Param<Tensor<B, 1>>>,
    layer: Option<HeadMaps<B>>,
    layer1: Option<Linear<B>>,
    layer2: Option<Linear<B>>,
    #[module(skip)]
    map: FeatureMap,
    #[module(skip)]
    fixed: Vec<f32>,
}

/// Weights that [`FeatureMap::init`] made for this map.
fn made<T>(part: &Option<T>) -> &T {
    part.as_ref().expect("`init` made what the map needs")
}

impl<B: LinearAttentionBackend> Features<B> {
    /// `x`: `[B, T, H, K]`, whose first token stands at `position`. Gives `[B, T, H, features]`.
    pub fn forward(&self, x: Tensor<B, 4>, position: usize) -> Tensor<B, 4> {
        match self.map {
            FeatureMap::Identity => x,
            FeatureMap::Elu => elu_plus_one(x),
            FeatureMap::Relu => relu(x),
            FeatureMap::Taylor => {
                let x = shrunk(x);
                let one = x.clone().narrow(3, 0, 1).ones_like();
                cat(vec![one, x.clone(), half_square(x)], 3)
            }
            FeatureMap::LearnableSquare => {
                let (gamma, beta) = (made(&self.gamma).val(), made(&self.beta).val());
                let y = standardize(x, 1e-5) * gamma.unsqueeze::<4>() + beta.unsqueeze::<4>();
                half_square(shrunk(y)) * SQRT_2
            }
            FeatureMap::Performer { .. } => {
                let x = shrunk(x);
                let half = (x.clone() * x.clone()).sum_along(3) * 0.5;
                share((self.project(x) - half).exp(), 1)
            }
            FeatureMap::Rfa { .. } => {
                let angles = self.project(l2_normalize(x));
                share(cat(vec![angles.clone().sin(), angles.cos()], 3), 2)
            }
            FeatureMap::Cosformer { length } => falling(relu(x), position, length),
            FeatureMap::Hedgehog => {
                let y = made(&self.layer).forward(x) * 2.0;
                softmax(cat(vec![y.clone(), y.neg()], 3), 3)
            }
            FeatureMap::Dijiang { .. } => {
                self.project(x).exp() * made(&self.weight).val().unsqueeze::<4>()
            }
            FeatureMap::Dpfp { nu } => neighbours(x, nu),
            FeatureMap::ElementwiseProduct => {
                let (layer1, layer2) = (made(&self.layer1), made(&self.layer2));
                by_rows(x, |x| layer1.forward(x.clone()) * layer2.forward(x))
            }
        }
    }

    /// Whether features depend on positions.
    pub(crate) fn counts_tokens(&self) -> bool {
        matches!(self.map, FeatureMap::Cosformer { .. })
    }

    /// As [`forward`](Self::forward), in the type of `x`, as shares of their sum where `shares` says so:
    /// exponentials and squares want more than 16 bits.
    pub(crate) fn typed(&self, x: Tensor<B, 4>, position: usize, shares: bool) -> Tensor<B, 4> {
        let dtype = x.dtype();
        let features = self.forward(accumulator(x), position);
        typed(if shares { over_sum(features, 1e-4) } else { features }, dtype)
    }

    /// Times the columns that are not learnt.
    fn project(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let width = x.dims()[3];
        let shape = [width, self.fixed.len() / width];
        let data = TensorData::new(self.fixed.clone(), shape);
        let columns = Tensor::<B, 2>::from_data(data, (&x.device(), x.dtype()));
        by_rows(x, |x| x.matmul(columns))
    }
}

/// A linear map with bias for each head, `K -> K`.
#[derive(Module, Debug)]
pub struct HeadMaps<B: Backend> {
    /// `[H, K, K]`.
    weight: Param<Tensor<B, 3>>,
    /// `[H, K]`.
    bias: Param<Tensor<B, 2>>,
}

impl<B: Backend> HeadMaps<B> {
    fn identity(heads: usize, width: usize, device: &B::Device) -> Self {
        let place = |n: usize| if n / width % width == n % width { 1.0 } else { 0.0 };
        let values: Vec<f32> = (0..heads * width * width).map(place).collect();
        let data = TensorData::new(values, [heads, width, width]);
        Self {
            weight: Param::from_tensor(Tensor::from_data(data, device)),
            bias: Initializer::Zeros.init([heads, width], device),
        }
    }

    /// `[B, T, H, K]` to the same.
    fn forward(&self, x: Tensor<B, 4>) -> Tensor<B, 4> {
        let [batch, tokens, heads, width] = x.dims();
        let by_head = x.reshape([batch * tokens, heads, width]).swap_dims(0, 1);
        let y = by_head.matmul(self.weight.val()) + self.bias.val().unsqueeze_dim::<3>(1);
        y.swap_dims(0, 1).reshape([batch, tokens, heads, width])
    }
}

/// `f` over rows of the last dimension.
fn by_rows<B: Backend>(
    x: Tensor<B, 4>,
    f: impl FnOnce(Tensor<B, 2>) -> Tensor<B, 2>,
) -> Tensor<B, 4> {
    let [batch, tokens, heads, width] = x.dims();
    let y = f(x.reshape([batch * tokens * heads, width]));
    let width = y.dims()[1];
    y.reshape([batch, tokens, heads, width])
}

/// `x / K^(1/4)`.
fn shrunk<B: Backend>(x: Tensor<B, 4>) -> Tensor<B, 4> {
    let width = x.dims()[3] as f64;
    x * width.powf(-0.25)
}

/// `x / sqrt(m)`, where m random vectors gave `each` features apiece.
fn share<B: Backend>(x: Tensor<B, 4>, each: usize) -> Tensor<B, 4> {
    let vectors = (x.dims()[3] / each) as f64;
    x * vectors.powf(-0.5)
}

/// `x_i^2 / sqrt(2)` and `x_i x_j` for i < j: two of these have the product `(x . y)^2 / 2`.
fn half_square<B: Backend>(x: Tensor<B, 4>) -> Tensor<B, 4> {
    let (width, device) = (x.dims()[3], x.device());
    let pairs: Vec<(usize, usize)> =
        (0..width).flat_map(|i| (i..width).map(move |j| (i, j))).collect();
    let count = pairs.len();
    let places = |place: fn(&(usize, usize)) -> usize| {
        let places: Vec<i32> = pairs.iter().map(|pair| place(pair) as i32).collect();
        Tensor::<B, 1, Int>::from_data(TensorData::new(places, [count]), &device)
    };
    let weight = |&(i, j): &(usize, usize)| if i == j { FRAC_1_SQRT_2 as f32 } else { 1.0 };
    let weights = TensorData::new(pairs.iter().map(weight).collect::<Vec<f32>>(), [1, 1, 1, count]);
    let weights = Tensor::<B, 4>::from_data(weights, (&device, x.dtype()));
    x.clone().select(3, places(|pair| pair.0)) * x.select(3, places(|pair| pair.1)) * weights
}

/// Features of [`polynomial`].
pub(crate) fn polynomial_width(key_width: usize, degree: usize) -> usize {
    let pairs = key_width * (key_width + 1) / 2;
    1 + key_width + if degree > 1 { pairs } else { 0 }
}

/// `c_0`, `c_1 x_i`, and with a third coefficient `c_2 x_i^2 / sqrt(2)` and `c_2 x_i x_j`: two of these have the product
/// `c_0^2 + c_1^2 s + c_2^2 s^2 / 2`, s being that of the vectors.
pub(crate) fn polynomial<B: Backend>(x: Tensor<B, 4>, coefficients: Tensor<B, 1>) -> Tensor<B, 4> {
    let [count] = coefficients.dims();
    let coefficient = |i: usize| coefficients.clone().narrow(0, i, 1).unsqueeze::<4>();
    let one = x.clone().narrow(3, 0, 1).ones_like();
    let mut terms = vec![one * coefficient(0), x.clone() * coefficient(1)];
    if count > 2 {
        terms.push(half_square(x) * coefficient(2));
    }
    cat(terms, 3)
}

/// `x cos(a)` and `x sin(a)`: two of these, at two positions, have their product times the cosine of
/// the distance, which is a quarter of a turn at `length`.
fn falling<B: Backend>(x: Tensor<B, 4>, position: usize, length: usize) -> Tensor<B, 4> {
    let tokens = x.dims()[1];
    let angle = |t: usize| FRAC_PI_2 * t as f64 / length as f64;
    let table = |f: fn(f64) -> f64| {
        let values: Vec<f32> = (position..position + tokens).map(|t| f(angle(t)) as f32).collect();
        let data = TensorData::new(values, [1, tokens, 1, 1]);
        Tensor::<B, 4>::from_data(data, (&x.device(), x.dtype()))
    };
    let (cos, sin) = (table(f64::cos), table(f64::sin));
    cat(vec![x.clone() * cos, x * sin], 3)
}

/// `elu(x) + 1`, as e^min(x, 0) + max(x, 0): x + 1 above zero, e^x below.
pub(crate) fn elu_plus_one<B: Backend>(x: Tensor<B, 4>) -> Tensor<B, 4> {
    x.clone().clamp_max(0.0).exp() + relu(x)
}

/// Entries of the last dimension as shares of their sum, to which `epsilon` is added.
pub(crate) fn over_sum<B: Backend>(x: Tensor<B, 4>, epsilon: f64) -> Tensor<B, 4> {
    x.clone() / (x.sum_along(3) + epsilon)
}

/// Refuses distances of DPFP that keys of `key_width` numbers do not have.
pub(crate) fn check_nu(nu: usize, key_width: usize) -> Result<(), ConfigError> {
    if (1..2 * key_width).contains(&nu) {
        return Ok(());
    }
    let want = format!("1 to {}, below twice the key width", 2 * key_width - 1);
    Err(ConfigError::new("nu", nu, want))
}

/// `width`, the number of features of a key of `key_width` numbers, if it is no larger than anything may be.
pub(crate) fn check_width(key_width: usize, width: usize) -> Result<usize, ConfigError> {
    if width <= LARGEST {
        return Ok(width);
    }
    let want = format!("small enough for {LARGEST} features; these are {width}");
    Err(ConfigError::new("key_width", key_width, want))
}

/// `r_i r_{i - n}` for every n up to `nu`, places modulo 2 K.
pub(crate) fn neighbours<B: Backend>(x: Tensor<B, 4>, nu: usize) -> Tensor<B, 4> {
    let width = 2 * x.dims()[3];
    let r = relu(cat(vec![x.clone(), x.neg()], 3));
    let twice = cat(vec![r.clone(), r.clone()], 3);
    let products = (1..=nu).map(|n| r.clone() * twice.clone().narrow(3, width - n, width));
    cat(products.collect(), 3)
}

/// Draws from N(0, 1): the same ones for the same seed, whatever else was drawn in between.
struct Normal(u64);

impl Normal {
    /// Uniform in 0 to 1, without the ends (SplitMix64).
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^= x >> 31;
        ((x >> 12) as f64 + 0.5) / (1u64 << 52) as f64
    }

    /// Box and Muller's way.
    fn draw(&mut self) -> f64 {
        let (length, angle) = (self.uniform(), self.uniform());
        (-2.0 * length.ln()).sqrt() * (TAU * angle).cos()
    }

    fn row(&mut self, width: usize) -> Vec<f64> {
        (0..width).map(|_| self.draw()).collect()
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// `count` rows, each `width` numbers from N(0, 1), at right angles to the others of its block of
/// `width` rows.
fn orthogonal_rows(count: usize, width: usize, normal: &mut Normal) -> Vec<Vec<f64>> {
    let mut rows: Vec<Vec<f64>> = vec![];
    for n in 0..count {
        let mut row = normal.row(width);
        for other in &rows[n - n % width..] {
            let shadow = dot(&row, other);
            row.iter_mut().zip(other).for_each(|(x, o)| *x -= shadow * o);
        }
        let length = dot(&row, &row).sqrt();
        row.iter_mut().for_each(|x| *x /= length);
        rows.push(row);
    }
    // Directions are all; lengths are those of independent rows.
    for row in &mut rows {
        let other = normal.row(width);
        let length = dot(&other, &other).sqrt();
        row.iter_mut().for_each(|x| *x *= length);
    }
    rows
}

/// Row i of the orthonormal cosine transform (DCT-II).
fn cosine_row(i: usize, width: usize) -> Vec<f64> {
    let scale = if i == 0 { 1.0 } else { SQRT_2 } / (width as f64).sqrt();
    let angle = |j: usize| PI * (2 * j + 1) as f64 * i as f64 / (2 * width) as f64;
    (0..width).map(|j| scale * angle(j).cos()).collect()
}
