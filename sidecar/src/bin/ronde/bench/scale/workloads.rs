//! The models whose steps are predicted: their tensors by their published shapes, and assumed times of computation.

/// How a model's tensors are kept and exchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exchange {
    /// Each GPU has all parameters; the gradients of a step are all-reduced.
    AllReduce,
    /// Each GPU has a shard of each block (FSDP, ZeRO-3): parameters are gathered twice, gradients reduced and scattered.
    Sharded,
}

/// A training job.
#[derive(Clone, Debug)]
pub(super) struct Workload {
    pub(super) name: &'static str,
    pub(super) exchange: Exchange,
    pub(super) element_bytes: u32,
    /// Elements of each tensor, or of each block that is sharded as one, in the order of the forward pass.
    pub(super) elements: Vec<u64>,
    /// The time of a step of one GPU alone. Assumed, not measured.
    pub(super) compute_us: f64,
    /// What that assumes.
    pub(super) assumed: &'static str,
}

impl Workload {
    pub(super) fn parameters(&self) -> u64 {
        self.elements.iter().sum()
    }

    /// Bytes of all gradients, or parameters, of a GPU.
    pub(super) fn bytes(&self) -> u64 {
        self.parameters() * u64::from(self.element_bytes)
    }
}

/// The four models of the page.
pub(super) fn workloads() -> [Workload; 4] {
    [
        Workload {
            name: "ResNet-101",
            exchange: Exchange::AllReduce,
            element_bytes: 4,
            elements: resnet([3, 4, 23, 3]),
            compute_us: images_us(64.0, 130.0),
            assumed: "a GPU of 2016 (Pascal): 64 images a step, 130 images/s",
        },
        Workload {
            name: "VGG-16",
            exchange: Exchange::AllReduce,
            element_bytes: 4,
            elements: vgg16(),
            compute_us: images_us(64.0, 154.0),
            assumed: "a GPU of 2016 (Pascal): 64 images a step, 154 images/s",
        },
        Workload {
            name: "BERT-large",
            exchange: Exchange::AllReduce,
            element_bytes: 4,
            elements: bert_large(),
            compute_us: tokens_us(&bert_large(), 16_384.0),
            assumed: "a GPU of 125 TFLOP/s achieved: 32 sequences of 512 tokens a step, 6 FLOP for each parameter and token",
        },
        Workload {
            name: "7 B, FSDP",
            exchange: Exchange::Sharded,
            element_bytes: 2,
            elements: decoder_7b(),
            compute_us: tokens_us(&decoder_7b(), 8_192.0),
            assumed: "a GPU of 125 TFLOP/s achieved: 8,192 tokens a step, 6 FLOP for each parameter and token",
        },
    ]
}

fn images_us(images: f64, images_per_second: f64) -> f64 {
    images / images_per_second * 1e6
}

fn tokens_us(elements: &[u64], tokens: f64) -> f64 {
    let parameters = elements.iter().sum::<u64>() as f64;
    6.0 * parameters * tokens / FLOP_PER_US
}

/// 125 TFLOP/s.
const FLOP_PER_US: f64 = 125e6;

/// The tensors of a residual network of bottlenecks, with so many blocks in each of its four stages. K. He et al., *Deep
/// Residual Learning for Image Recognition*, CVPR 2016.
pub(crate) fn resnet(blocks: [u64; 4]) -> Vec<u64> {
    let mut elements = vec![9_408, 64, 64];
    let mut input = 64;
    for (blocks, width) in blocks.into_iter().zip([64, 128, 256, 512]) {
        for block in 0..blocks {
            let output = 4 * width;
            elements.extend([input * width, width, width, 9 * width * width, width, width]);
            elements.extend([width * output, output, output]);
            if block == 0 {
                elements.extend([input * output, output, output]);
            }
            input = output;
        }
    }
    elements.extend([2_048_000, 1_000]);
    elements
}

/// K. Simonyan and A. Zisserman, *Very Deep Convolutional Networks for Large-Scale Image Recognition*, ICLR 2015.
fn vgg16() -> Vec<u64> {
    let widths = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512];
    let convolutions = widths.windows(2).flat_map(|pair| [9 * pair[0] * pair[1], pair[1]]);
    let classifier = [(25_088, 4_096), (4_096, 4_096), (4_096, 1_000)];
    convolutions.chain(classifier.into_iter().flat_map(|(input, output)| [input * output, output])).collect()
}

/// J. Devlin et al., *BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding*, NAACL 2019.
fn bert_large() -> Vec<u64> {
    let width = 1_024;
    let linear = |input: u64, output: u64| [input * output, output];
    let mut elements = vec![30_522 * width, 512 * width, 2 * width, width, width];
    for _ in 0..24 {
        for _ in 0..4 {
            elements.extend(linear(width, width));
        }
        elements.extend([width, width]);
        elements.extend(linear(width, 4 * width));
        elements.extend(linear(4 * width, width));
        elements.extend([width, width]);
    }
    elements.extend(linear(width, width));
    elements
}

/// The blocks of a decoder of 32 layers: embedding, layers, head. H. Touvron et al., *LLaMA: Open and Efficient Foundation
/// Language Models*, 2023.
fn decoder_7b() -> Vec<u64> {
    let (width, inner, words) = (4_096, 11_008, 32_000);
    let layer = 4 * width * width + 3 * width * inner + 2 * width;
    let mut elements = vec![words * width];
    elements.extend([layer; 32]);
    elements.push(words * width + width);
    elements
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_have_their_published_numbers_of_parameters() {
        assert_eq!(resnet([3, 4, 6, 3]).iter().sum::<u64>(), 25_557_032);
        let expected = [44_549_160, 138_357_544, 335_141_888, 6_738_415_616];
        assert_eq!(workloads().map(|workload| workload.parameters()), expected);
    }
}
